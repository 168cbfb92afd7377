"""The engine, asked as a server is, says what it says when it is asked directly."""

import asyncio
from collections.abc import Iterator

import pytest
from tiny import METHODS, make_drafter, make_target

from peagle.bench.load import AnswerError, closed_loop
from peagle.bench.native import Native
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Stats

QUESTIONS = [["the cat"], ["what a day! what a day!"], ["then the other cat ran"], ["a"]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(params=METHODS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    method: str = request.param
    target = make_target()
    yield LLM(target, make_drafter(target, method), k=3, max_batch=3, deterministic=True)


def test_the_same_ids_and_counts(llm: LLM) -> None:
    async def play() -> tuple[list[tuple[int, ...]], object]:
        async with Native(llm, PARAMS) as native:
            played = await closed_loop(QUESTIONS, 3, native)
        return [s.output for s in sorted(played.samples, key=lambda s: s.conversation)], played

    said, played = asyncio.run(play())
    asked = [prompt_ids(llm.tokenizer, [{"role": "user", "content": q[0]}]) for q in QUESTIONS]
    alone, stats = llm.use(llm.drafter, 3).generate(asked, PARAMS), Stats()  # a new engine
    for answer in alone:
        stats += answer.stats
    assert said == [tuple(answer.token_ids) for answer in alone]
    assert played.drafting == stats
    assert all(0 < s.ttft <= s.seconds and s.tokens == 12 for s in played.samples)


def test_what_does_not_fit_is_an_error_of_its_own(llm: LLM) -> None:
    async def play() -> list[str]:
        async with Native(llm, PARAMS) as native:
            with pytest.raises(AnswerError, match="shorten it"):
                await native.ask([{"role": "user", "content": "cat " * 400}])
            return (await closed_loop([["cat " * 400], ["the cat"]], 2, native)).errors

    assert len(asyncio.run(play())) == 1


def test_an_engine_that_breaks_leaves_nobody_waiting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RequestFailure("no more")

    monkeypatch.setattr(llm.engine, "step", broken)

    async def ask() -> None:
        async with Native(llm, PARAMS) as native:
            await native.ask([{"role": "user", "content": "the cat"}])

    with pytest.raises(RequestFailure, match="no more"):
        asyncio.run(asyncio.wait_for(ask(), 10))
