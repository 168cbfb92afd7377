"""What the event loop and the engine thread exchange."""

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
    """How drafting fares in an answer, from its beginning; see `engine.request.Stats`."""

    tokens: int
    rounds: int  # with drafts
    drafted: int  # draft tokens
    accepted: int  # of them
    accepted_from_lookup: int  # of these
    forwards: int  # decoding rounds, with or without drafts


@dataclass(frozen=True, slots=True)
class Update:
    """What a round emitted for a request. Until it has `ended`, only its constants may be read."""

    request: Request
    chunks: list[Chunk]
    ended: bool
    drafting: Drafting


class ExclusiveJob:
    """A generator that the engine thread runs while no request does."""

    def __init__(self, steps: Generator[Event, None, None]) -> None:
        self.steps = steps
        self.events: asyncio.Queue[Event | ApiError | None] = asyncio.Queue()  # None: the end


class Job:
    """The requests of one call: `copies` answers to each of its prompts. It counts before they are
    made."""

    def __init__(self, count: int, copies: int) -> None:
        self.copies = copies
        self.arrived = time.monotonic()
        self.tracks = list[Track]()
        self.left = count  # requests that have not ended
        self.limit: asyncio.TimerHandle | None = None
        self.received: asyncio.Queue[Update | None] = asyncio.Queue()  # None: the engine failed

    @property
    def requests(self) -> list[Request]:
        return [track.request for track in self.tracks]

    async def updates(self) -> AsyncIterator[Update]:
        """Until all requests have ended. Raises ApiError when the engine fails."""
        ended = 0
        while ended < len(self.tracks):
            update = await self.received.get()
            if update is None:
                raise ApiError(500, FAILED)
            ended += update.ended
            yield update


def pieces(chunks: list[Chunk]) -> list[dict[str, Any]]:
    """Text as it was emitted, with each piece's place in the draft and its source."""
    return [{"text": one.text, "place": one.depth, "source": one.source} for one in chunks]
