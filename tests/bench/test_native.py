"""Loads: the engine answers their turns as it does directly, so many at a time as asked for."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import METHODS, make_drafter, make_target

from peagle.bench.native import Player, device_name
from peagle.bench.summary import Sample
from peagle.data.chat import Message, prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Request, Stats

QUESTIONS = [["the cat"], ["what a day! what a day!"], ["then the other cat ran"], ["a"]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TURNS = [[f"{i} cat", f"{i} mat"] for i in range(7)]
TOO_LONG = "cat " * 400


@pytest.fixture(params=METHODS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    method: str = request.param
    target = make_target()
    yield LLM(target, make_drafter(target, method), k=3, max_batch=3, deterministic=True)


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(make_target(), max_batch=50, lookup=False)


def test_the_same_ids_and_counts(llm: LLM) -> None:
    played = Player(llm, PARAMS).play(QUESTIONS, 3)
    samples = sorted(played.samples, key=lambda sample: sample.conversation)
    asked = [prompt_ids(llm.tokenizer, [{"role": "user", "content": q[0]}]) for q in QUESTIONS]
    alone, stats = llm.use(llm.drafter, 3).generate(asked, PARAMS), Stats()  # a new engine
    for answer in alone:
        stats += answer.stats
    assert [sample.output for sample in samples] == [tuple(answer.token_ids) for answer in alone]
    assert played.drafting == stats
    assert all(0 < s.ttft <= s.seconds and s.tokens == 12 for s in played.samples)


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_as_many_at_a_time_as_asked(
    alone: LLM, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    engine = alone.engine
    step = engine.step
    open_ = list[int]()

    def counted() -> None:
        open_.append(len(engine.scheduler.running) + len(engine.scheduler.waiting))
        step()

    monkeypatch.setattr(engine, "step", counted)
    played = Player(alone, PARAMS).play(TURNS, concurrency, first=2)
    assert max(open_) == min(concurrency, len(TURNS))
    assert not played.errors
    assert sorted(sample.key for sample in played.samples) == [
        (i + 2, turn) for i in range(7) for turn in range(2)
    ]
    assert sum(s.seconds for s in played.samples) <= played.seconds * concurrency


def test_later_turns_bring_the_answers_before_them(
    alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[list[Message]]()
    request = Player.request

    def noted(player: Player, messages: list[Message], params: SamplingParams) -> Request:
        heard.append([dict(message) for message in messages])
        return request(player, messages, params)

    monkeypatch.setattr(Player, "request", noted)
    first, _ = Player(alone, PARAMS).play([["a", "b"]], 1).samples
    assert heard[1] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "b"},
    ]


def test_each_play_of_a_player_counts_alone(alone: LLM) -> None:
    player = Player(alone, PARAMS)
    first, second = player.play([["a"]], 1), player.play([["the cat"]], 1)
    assert len(first.samples) == len(second.samples) == 1
    assert first.drafting == second.drafting


def test_a_turn_that_does_not_fit_ends_its_conversation_alone(alone: LLM) -> None:
    done = list[int]()
    turns: Any = [["the cat", TOO_LONG, "more"], [TOO_LONG, "more"], ["the cat"]]
    played = Player(alone, PARAMS).play(turns, 2, done.append)
    assert [("shorten it" in error) for error in played.errors] == [True, True]
    assert sorted(sample.key for sample in played.samples) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert sum(done) == 6


def test_a_request_that_fails_ends_its_conversation(
    alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(
        finish_reason="error", failure="no room", stats=Stats(), output=[], tokens=[], emitted=[]
    )
    monkeypatch.setattr(type(alone), "make_requests", lambda *_: [ended])
    monkeypatch.setattr(alone.engine, "add", lambda _: None)
    played = Player(alone, PARAMS).play([["a", "b"]], 1)
    assert played.errors == ["no room"] and len(played.samples) == 1


def test_an_engine_that_breaks_ends_the_load(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RequestFailure("no more")

    monkeypatch.setattr(llm.engine, "step", broken)
    with pytest.raises(RequestFailure, match="no more"):
        Player(llm, PARAMS).play([["the cat"]], 1)


def test_the_device_that_is_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU of {device}")
    assert device_name(torch.device("cuda:1")) == "GPU of cuda:1"
    assert device_name(torch.device("cpu")).endswith(" cores")


@pytest.mark.parametrize(("tokens", "tpot"), [(1, None), (3, 0.4)])
def test_time_a_token_is_that_after_the_first(tokens: int, tpot: float | None) -> None:
    sample = Sample(0, 0, seconds=1.0, ttft=0.2, tokens=tokens)
    assert sample.tpot == (None if tpot is None else pytest.approx(tpot))
