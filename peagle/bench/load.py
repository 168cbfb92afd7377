"""How it is asked: so many conversations at a time, or at random times; and what each turn took.

The same code loads an engine in this process and a server behind a URL.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

Message = dict[str, str]
FAILURES = 3  # without an answer between them: whoever is asked has stopped answering


class AskError(RuntimeError):
    """A turn that was not answered; the text says why."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone  # it may be that nothing will be answered any more


class Answer(NamedTuple):
    """What was said to a turn. Times are of time.perf_counter()."""

    text: str
    tokens: int  # of output
    first: float  # when the first token came
    token_ids: tuple[int, ...] | None = None  # where they are known


@dataclass(frozen=True, slots=True)
class Sample:
    """A turn that was asked."""

    conversation: int
    turn: int
    seconds: float  # from asking to the last token
    ttft: float  # seconds to the first
    tokens: int
    said: tuple[int, ...] | str = ""  # token ids where they are known, else the text
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds a token behind the first; None when there is one only."""
        return (self.seconds - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(slots=True)
class Drafting:
    """How drafting fared, counted as vLLM does: rounds with drafts only."""

    rounds: float = 0
    accepted: float = 0
    by_position: list[float] = field(default_factory=list)  # rounds whose i-th was accepted

    def __add__(self, other: "Drafting") -> "Drafting":
        """Of both."""
        pairs = zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        positions = [mine + theirs for mine, theirs in pairs]
        return Drafting(self.rounds + other.rounds, self.accepted + other.accepted, positions)

    def row(self) -> dict[str, Any]:
        """Acceptance length and by position; None where nothing was counted."""
        if not self.rounds:
            return {"acceptance_length": None, "accepted_per_position": []}
        return {
            "acceptance_length": round(1 + self.accepted / self.rounds, 4),
            "accepted_per_position": [round(n / self.rounds, 4) for n in self.by_position],
        }


class Asker(Protocol):
    """Who answers."""

    async def ask(self, messages: list[Message]) -> Answer:
        """Raises AskError when a turn is not answered."""

    async def drafting(self) -> Drafting:
        """Since it was opened."""


class Played(NamedTuple):
    """A load, from its first request to its last token."""

    samples: list[Sample]
    seconds: float
    drafting: Drafting
    whole: bool  # False: nobody answered any more, and the rest was not asked

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error is not None]


class _Player:
    """Plays conversations, and stops when nothing is answered any more."""

    def __init__(self, asker: Asker, on_done: Callable[[], None]) -> None:
        self.asker, self.on_done = asker, on_done
        self.samples, self.failures = list[Sample](), 0

    async def played(self, seconds: float) -> Played:
        """What came of it."""
        whole = self.failures < FAILURES
        return Played(self.samples, seconds, await self.asker.drafting(), whole)

    async def play(self, number: int, turns: list[str]) -> None:
        """One conversation, turn by turn."""
        history = list[Message]()
        for turn, said in enumerate(turns):
            if self.failures >= FAILURES:
                return
            history.append({"role": "user", "content": said})
            started = time.perf_counter()
            try:
                answer = await self.asker.ask(history)
            except AskError as error:
                self.failures += error.gone
                took = time.perf_counter() - started
                self.samples.append(Sample(number, turn, took, 0.0, 0, error=str(error)))
                return
            self.failures = 0
            ended = time.perf_counter()
            seen = answer.text if answer.token_ids is None else answer.token_ids
            took, first = ended - started, answer.first - started
            sample = Sample(number, turn, took, first, answer.tokens, seen, answer.text)
            self.samples.append(sample)
            history.append({"role": "assistant", "content": answer.text})
        self.on_done()


async def closed_loop(
    conversations: list[list[str]],
    concurrency: int,
    asker: Asker,
    on_done: Callable[[], None] = lambda: None,
) -> Played:
    """`concurrency` conversations at a time; the next begins when one has ended."""
    player, todo = _Player(asker, on_done), iter(enumerate(conversations))

    async def worker() -> None:
        for number, turns in todo:
            await player.play(number, turns)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(conversations))):
            group.create_task(worker())
    return await player.played(time.perf_counter() - started)


async def open_loop(
    conversations: list[list[str]],
    rate: float,
    asker: Asker,
    on_done: Callable[[], None] = lambda: None,
) -> Played:
    """Conversations begin at the times of a Poisson process of `rate` a second (always the same
    times), whether earlier ones have ended or not."""
    player, times, at = _Player(asker, on_done), random.Random(0), 0.0
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, turns in enumerate(conversations):
            at += times.expovariate(rate)
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            group.create_task(player.play(number, turns))
    return await player.played(time.perf_counter() - started)
