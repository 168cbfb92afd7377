"""Many requests of all kinds, arriving and leaving at random: each gets what it would get alone."""

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from answers import alone, token_ids
from refusals import refused
from tiny import METHODS

from peagle.engine.draft import Proposer
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.engine.tree import Offer
from peagle.methods.base import NewSlots
from peagle.model.drafter import Drafter
from peagle.model.target import Target

COUNT = 200
SHARED = [60 + i % 50 for i in range(40)]  # a system prompt that half of them begin with
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.4, top_p=0.8, min_p=0.02, seed=2),
    SamplingParams(temperature=0.7, top_k=9, repetition_penalty=1.3, seed=3),
    SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingParams(logit_bias={70: 4.0, 71: -100.0}, stop_token_ids=(80, 81)),
]


def asked() -> list[tuple[list[int], SamplingParams]]:
    chance, requests = random.Random(7), []
    for number in range(COUNT):
        own = [chance.randint(5, 127) for _ in range(chance.randint(1, 24))]
        prompt = SHARED + own if chance.random() < 0.5 else own
        params = replace(chance.choice(KINDS), max_tokens=chance.randint(1, 16))
        if params.seed is not None:
            params = replace(params, seed=number)
        requests.append((prompt, params))
    return requests


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[list[int]]:
    """The output of each alone."""
    llm = LLM(target, deterministic=True, max_batch=1, lookup=False)
    return [llm.generate([ids], params)[0].token_ids for ids, params in asked()]


def free_blocks(engine: Engine) -> bool:
    return engine.idle and engine.scheduler.pool.free == engine.scheduler.pool.count


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_under_load(
    target: Target, drafters: dict[str, Drafter], wanted: list[list[int]], seed: int
) -> None:
    method, k = METHODS[seed % 2], (None, 3, 9)[seed]
    llm = LLM(target, drafters[method], k=k, deterministic=True, max_batch=6, kv_tokens=210)
    engine, chance = llm.engine, random.Random(seed)
    arriving = list[Request]()
    for ids, params in asked():
        arriving += llm.make_requests(ids, params, len(arriving))
    everyone, cancelled = list(arriving), 0
    while arriving or not engine.idle:
        for _ in range(chance.choice([0, 0, 1, 2, 9])):
            if arriving:
                request = arriving.pop(chance.randrange(len(arriving)))
                engine.add(request)
        for where in (engine.scheduler.waiting, engine.scheduler.running):
            if where and chance.random() < 0.02:
                engine.cancel(chance.choice(list(where)))
                cancelled += 1
        engine.step()
    for request, own in zip(everyone, wanted, strict=True):
        if request.finish_reason == "abort":
            assert request.output == own[: len(request.output)]
        else:
            assert request.output == own, (request.index, request.params)
    assert free_blocks(engine)
    assert cancelled > 0 and sum(r.preempted for r in everyone) > 0
    found = sum(r.num_cached_tokens for r in everyone)
    assert found > 10 * len(SHARED), "prompts were found in the cache"
    if k is not None:  # else drafting may not pay on the machine of the test
        assert sum(sum(r.stats.accepted) for r in everyone) > 50, "drafts were accepted"


def test_a_prompt_found_in_the_cache_is_drafted_for_as_well(
    target: Target, drafter: Drafter
) -> None:
    """The head's keys are found with the target's: acceptance is the same to the token."""
    llm, prompt = LLM(target, drafter, k=3), [*SHARED, 9, 17]
    first, again = (llm.stream([prompt], SamplingParams(max_tokens=24)) for _ in range(2))
    for run in (first, again):
        list(run)
    assert (first.requests[0].num_cached_tokens, again.requests[0].num_cached_tokens) == (0, 32)
    one, two = first.completions()[0], again.completions()[0]
    assert (one.token_ids, one.stats) == (two.token_ids, two.stats)
    assert sum(one.stats.accepted) > 3


def test_prompts_are_found_where_nothing_is_drafted(
    target: Target, p_eagle: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(target, p_eagle, k=3)
    monkeypatch.setattr(llm.engine, "_depths", lambda requests, _: [0] * len(requests))
    for reused in (0, 32):
        run = llm.stream([[*SHARED, 9]], SamplingParams(max_tokens=5))
        list(run)
        assert run.requests[0].num_cached_tokens == reused and run.requests[0].stats.rounds == 0


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[list[NewSlots]]:
    """Inputs of the drafter, round by round."""
    seen, propose = list[list[NewSlots]](), Proposer.propose

    def noted(proposer: Proposer, slots: list[NewSlots], *more: Any) -> list[Offer]:
        seen.append(slots)
        return propose(proposer, slots, *more)

    monkeypatch.setattr(Proposer, "propose", noted)
    return seen


Drafts = dict[tuple[int, ...], list[int]]  # what was drafted, by all tokens before it


def drafts(llm: LLM, quiet: int, prompts: list[list[int]]) -> Drafts:
    """In the first `quiet` rounds nothing is drafted."""
    rounds, depths, seen = 0, llm.engine._depths, Drafts()
    llm.engine._depths = lambda requests, found: (  # type: ignore[method-assign]
        [0] * len(requests) if rounds < quiet else depths(requests, found)
    )
    run = llm.stream(prompts, SamplingParams(max_tokens=30))
    while not run.requests or any(r.finish_reason is None for r in run.requests):
        run.step()
        rounds += 1
        seen |= {tuple(r.tokens): r.draft.tokens for r in run.requests if r.draft}
    llm.engine._depths = depths  # type: ignore[method-assign]
    return seen


def as_ever(target: Target, drafter: Drafter, seen: Drafts) -> bool:
    """They are what a new engine drafts behind the same tokens."""
    for tokens, draft in seen.items():
        run = LLM(target, drafter, k=3).stream([tokens[:-1]], SamplingParams(max_tokens=9))
        run.step()
        [request] = run.requests
        if (tuple(request.tokens), request.draft.tokens) != (tokens, draft):
            return False
    return len({tuple(draft) for draft in seen.values()}) > 2


def test_an_idle_head_catches_up(target: Target, drafter: Drafter) -> None:
    """Behind a stretch without drafts, drafts are those of a head that has run all along: be it its
    own stretch, or another request's whose blocks were found."""
    chance = random.Random(0)
    prompt = [chance.randint(5, 127) for _ in range(21)]
    llm = LLM(target, drafter, k=3)
    later = drafts(llm, 9, [prompt])
    assert as_ever(target, drafter, later) and len(min(later)) > len(prompt) + 8
    llm = LLM(target, drafter, k=3)
    assert not drafts(llm, 99, [prompt])
    found = drafts(llm, 0, [prompt])
    assert as_ever(target, drafter, found) and len(min(found)) == len(prompt) + 1


def test_a_head_catches_up_within_the_budget_of_rounds(
    target: Target, drafter: Drafter, proposed: list[list[NewSlots]]
) -> None:
    """And runs what requests share once."""
    chance = random.Random(0)
    shared = [chance.randint(5, 127) for _ in range(40)]
    prompts = [[*shared, 70 + at, 71, 72] for at in range(3)]
    llm = LLM(target, drafter, k=3)
    llm.generate([shared + [9]], SamplingParams(max_tokens=1))
    llm.engine.scheduler.budget = 20
    later = drafts(llm, 20, prompts)
    rows = [sum(len(new.ids) for new in slots) for slots in proposed]
    assert max(rows) == rows[0] == 20
    ran = [new.start + at for slots in proposed for new in slots for at in range(len(new.ids))]
    assert sorted(slot for slot in ran if slot < 32) == list(range(32)), "two blocks are shared"
    assert as_ever(target, drafter, later)


def test_one_that_fails_fails_alone(target: Target, p_eagle: Drafter) -> None:
    """NaN in one request's logits: the others, and those that take its blocks, are as before."""
    prompts = [[70, 71], [72, 73, 74], [75, 76]]
    params = SamplingParams(max_tokens=12)
    wanted = token_ids(alone(target, prompts, params))
    llm = LLM(target, p_eagle, k=2, max_batch=3, kv_tokens=100)
    run, model = llm.stream(prompts, params), llm.engine.model
    logits, calls = model.logits, count(1)

    def broken(hidden: torch.Tensor, *, largest: bool) -> torch.Tensor:
        out = logits(hidden, largest=largest)
        if next(calls) == 2:
            out[0] = float("nan")
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "logits", broken)
        list(run)
    failed, *fine = run.completions()
    assert failed.finish_reason == "error" and "NaN" in str(failed.failure)
    assert token_ids(fine) == wanted[1:]
    assert free_blocks(llm.engine)
    assert token_ids(llm.generate(prompts, params)) == wanted


def test_torchs_threads_are_given_back(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code takes some where other processes use the cores (native/team.h)."""
    llm, threads = LLM(target), torch.get_num_threads()
    monkeypatch.setattr(llm.engine, "draft", lambda _: torch.set_num_threads(threads + 1) or [])
    llm.generate([[70, 71]], SamplingParams(max_tokens=2))
    assert torch.get_num_threads() == threads


def test_too_little_cache_is_refused(target: Target) -> None:
    with refused("prompt[0]"):
        alone(target, [[7] * 50], SamplingParams(max_tokens=10), kv_tokens=40)
    with refused("kv_tokens"):
        LLM(target, kv_tokens=10**12).generate([[7]])
