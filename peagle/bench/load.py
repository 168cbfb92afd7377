"""A load: conversations are played, and each turn is timed."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from peagle.engine.params import RequestFailure
from peagle.engine.request import Stats

Message = dict[str, str]
Conversations = list[list[str]]  # the user turns of each
OnTurns = Callable[[int], None]  # called with the number of turns that are done or left out


class AnswerError(RequestFailure):
    """A turn that was not answered."""


class Answer(NamedTuple):
    """The answer to a turn."""

    text: str
    output: tuple[int, ...]  # token ids
    first: float  # time.perf_counter() at the first token


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured turn."""

    conversation: int
    turn: int
    seconds: float  # from the question to the last token
    ttft: float = 0.0  # seconds to the first token
    tokens: int = 0
    output: tuple[int, ...] = ()
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
    """An engine that answers turns."""

    stats: Stats  # drafting statistics of its answers so far

    async def ask(self, messages: list[Message]) -> Answer:
        """Answer a conversation. Raises AnswerError."""


class Played(NamedTuple):
    """A load that was played."""

    samples: list[Sample]
    seconds: float  # from the first question to the last token
    drafting: Stats

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all conversations."""
        return sum(sample.tokens for sample in self.samples) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error is not None]


async def closed_loop(
    conversations: Conversations,
    concurrency: int,
    client: Client,
    on_turns: OnTurns = lambda turns: None,
    first: int = 0,
) -> Played:
    """Play `concurrency` conversations at a time, numbered from `first`; the next begins when one
    has ended."""
    started = time.perf_counter()
    samples = list[Sample]()
    waiting = iter(enumerate(conversations, first))

    async def worker() -> None:
        for number, turns in waiting:
            played = await _conversation(client, number, turns, on_turns)
            samples.extend(played)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(conversations))):
            group.create_task(worker())
    return Played(samples, time.perf_counter() - started, client.stats)


async def _conversation(
    client: Client, number: int, turns: list[str], on_turns: OnTurns
) -> list[Sample]:
    """Ask the turns of one conversation in order; a failure ends it."""
    samples = list[Sample]()
    history = list[Message]()
    for turn, text in enumerate(turns):
        history.append({"role": "user", "content": text})
        sample = await _ask(client, number, turn, history)
        samples.append(sample)
        if sample.error is not None:
            on_turns(len(turns) - turn)
            break
        history.append({"role": "assistant", "content": sample.text})
        on_turns(1)
    return samples


async def _ask(client: Client, number: int, turn: int, history: list[Message]) -> Sample:
    started = time.perf_counter()
    try:
        text, output, first = await client.ask(history)
    except AnswerError as error:
        return Sample(number, turn, time.perf_counter() - started, error=str(error))
    seconds = time.perf_counter() - started
    return Sample(number, turn, seconds, first - started, len(output), output, text)
