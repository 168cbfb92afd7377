"""Loads: their turns, how many run at a time, and turns that are not answered."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from peagle.bench.load import Answer, AnswerError, Message, Sample, closed_loop
from peagle.engine.request import Stats


@dataclass
class Echo:
    """Says what was said last, after a while."""

    fails: frozenset[str] = frozenset()
    open: int = 0
    most: int = 0
    heard: list[list[Message]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    stats: Stats = field(default_factory=lambda: Stats(2, accepted=[1]))

    async def ask(self, messages: list[Message]) -> Answer:
        self.times.append(time.perf_counter())
        self.heard.append([dict(m) for m in messages])
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.001)
        self.open -= 1
        said = messages[-1]["content"]
        if said in self.fails:
            raise AnswerError(f"{said}: refused")
        return Answer(f"so {said}", tuple(said.encode()), time.perf_counter())


TURNS = [[f"{i} first", f"{i} second"] for i in range(7)]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_as_many_at_a_time_as_asked(concurrency: int) -> None:
    echo = Echo()
    played = asyncio.run(closed_loop(TURNS, concurrency, echo))
    assert echo.most == min(concurrency, len(TURNS))
    assert not played.errors
    assert sorted((s.conversation, s.turn) for s in played.samples) == [
        (i, turn) for i in range(7) for turn in range(2)
    ]
    assert all(s.text == f"so {TURNS[s.conversation][s.turn]}" for s in played.samples)
    assert all(s.tokens == len(TURNS[s.conversation][s.turn]) for s in played.samples)
    assert played.drafting == Stats(2, accepted=[1])
    assert sum(s.seconds for s in played.samples) <= played.seconds * concurrency


def test_later_turns_bring_the_answers_before_them() -> None:
    echo = Echo()
    asyncio.run(closed_loop([["a", "b"]], 1, echo))
    assert echo.heard[1] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "so a"},
        {"role": "user", "content": "b"},
    ]


def test_a_refused_turn_ends_its_conversation_alone() -> None:
    echo = Echo(fails=frozenset({"2 first", "4 second"}))
    played = asyncio.run(closed_loop(TURNS, 2, echo))
    assert played.errors == ["2 first: refused", "4 second: refused"]
    assert len(played.samples) == 13


def test_refusals_are_answers_of_a_kind() -> None:
    """A data set full of prompts that are too long does not end a load."""
    echo = Echo(fails=frozenset(f"{i} first" for i in range(6)))
    played = asyncio.run(closed_loop(TURNS, 1, echo))
    assert len(played.errors) == 6 and len(played.samples) == 8


@pytest.mark.parametrize(("tokens", "tpot"), [(1, None), (3, 0.4)])
def test_time_a_token_is_that_after_the_first(tokens: int, tpot: float | None) -> None:
    sample = Sample(0, 0, seconds=1.0, ttft=0.2, tokens=tokens)
    assert sample.tpot == (None if tpot is None else pytest.approx(tpot))
