"""What the event loop and the engine's thread hand each other."""

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from peagle.engine.request import Chunk, Request
from peagle.server.errors import ApiError
from peagle.server.metrics import Track

Event = dict[str, Any]
FAILED = "the engine has failed: the server ends, start it again"


class Drafting(NamedTuple):
    """How an answer fares, from its beginning."""

    tokens: int
    rounds: int  # with drafts
    accepted: int  # draft tokens


@dataclass(frozen=True, slots=True)
class Said:
    """What a round has brought of answer `index`; `ended` is its request, once it has."""

    index: int
    chunks: list[Chunk]
    ended: Request | None
    drafting: Drafting


class Visit:
    """Steps of another job, which the engine's thread runs while the engine is idle."""

    def __init__(self, steps: Generator[Event, None, None]) -> None:
        self.steps = steps
        self.news: asyncio.Queue[Event | ApiError | None] = asyncio.Queue()  # None: the end


class Job:
    """The requests of one call: `copies` answers to each of its prompts. It counts before they are
    made."""

    def __init__(self, count: int, copies: int) -> None:
        self.copies = copies
        self.arrived = time.monotonic()
        self.tracks = list[Track]()
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.news: asyncio.Queue[Said | None] = asyncio.Queue()  # None: the engine has failed
        self.left = count  # requests that have not ended
        self.limit: asyncio.TimerHandle | None = None

    @property
    def requests(self) -> list[Request]:
        return [track.request for track in self.tracks]

    async def said(self) -> AsyncIterator[Said]:
        """Until all requests have ended. Raises ApiError when the engine fails."""
        ended = 0
        while ended < len(self.tracks):
            said = await self.news.get()
            if said is None:
                raise ApiError(500, FAILED)
            ended += said.ended is not None
            yield said
