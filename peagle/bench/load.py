"""A load: conversations are played, and each turn is timed.

The same code plays them with an engine in this process and with a server at a URL.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from peagle.engine.request import Stats

Message = dict[str, str]
Conversations = list[list[str]]  # the user turns of each
OnTurns = Callable[[int], None]  # called with the number of turns that are done or left out
MAX_FAILURES = 3  # without a later answer before a client counts as gone


class AnswerError(RuntimeError):
    """A turn that was not answered. `gone`: no other may be answered either."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


class Answer(NamedTuple):
    """The answer to a turn."""

    text: str
    output: tuple[int, ...] | str  # token ids; the text where a server does not tell them
    tokens: int
    first: float  # time.perf_counter() at the first token


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured turn."""

    conversation: int
    turn: int
    seconds: float  # from the question to the last token
    ttft: float = 0.0  # seconds to the first token
    tokens: int = 0
    output: tuple[int, ...] | str = ""  # as in Answer
    text: str = ""
    error: str | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Its conversation and turn."""
        return self.conversation, self.turn

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.tokens < 2:
            return None
        return (self.seconds - self.ttft) / (self.tokens - 1)


class Client(Protocol):
    """An engine or a server that answers turns."""

    async def ask(self, messages: list[Message]) -> Answer:
        """Answer a conversation. Raises AnswerError."""

    async def drafting(self) -> Stats:
        """Drafting statistics since it was opened; no rounds where it counts none."""


class Played(NamedTuple):
    """A load that was played."""

    samples: list[Sample]
    seconds: float  # from the first question to the last token
    drafting: Stats
    whole: bool  # False: the client was gone, and the rest was not played

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all conversations."""
        return sum(sample.tokens for sample in self.samples) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error is not None]


class _Player:
    """Plays conversations until the client is gone."""

    def __init__(self, client: Client, on_turns: OnTurns) -> None:
        self.client = client
        self.on_turns = on_turns
        self.samples = list[Sample]()
        self.failures = list[float]()  # their times; an answer forgets those before its question
        self.started = time.perf_counter()

    @property
    def gone(self) -> bool:
        return len(self.failures) >= MAX_FAILURES

    async def play(self, number: int, turns: list[str]) -> None:
        """Ask the turns of one conversation in order; a failure ends it."""
        history = list[Message]()
        for turn, text in enumerate(turns):
            if self.gone:
                return
            history.append({"role": "user", "content": text})
            sample = await self._ask(number, turn, history)
            self.samples.append(sample)
            if sample.error is not None:
                self.on_turns(len(turns) - turn)
                return
            history.append({"role": "assistant", "content": sample.text})
            self.on_turns(1)

    async def _ask(self, number: int, turn: int, history: list[Message]) -> Sample:
        started = time.perf_counter()
        try:
            answer = await self.client.ask(history)
        except AnswerError as error:
            if error.gone:
                self.failures.append(time.perf_counter())
            return Sample(number, turn, time.perf_counter() - started, error=str(error))
        self.failures = [failed for failed in self.failures if failed > started]
        seconds = time.perf_counter() - started
        ttft = answer.first - started
        return Sample(number, turn, seconds, ttft, answer.tokens, answer.output, answer.text)

    async def played(self) -> Played:
        """The samples, once all conversations have ended."""
        seconds = time.perf_counter() - self.started
        return Played(self.samples, seconds, await self.client.drafting(), whole=not self.gone)


async def closed_loop(
    conversations: Conversations,
    concurrency: int,
    client: Client,
    on_turns: OnTurns = lambda turns: None,
    first: int = 0,
) -> Played:
    """Play `concurrency` conversations at a time, numbered from `first`; the next begins when one
    has ended."""
    player = _Player(client, on_turns)
    waiting = iter(enumerate(conversations, first))

    async def worker() -> None:
        for number, turns in waiting:
            await player.play(number, turns)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(conversations))):
            group.create_task(worker())
    return await player.played()
