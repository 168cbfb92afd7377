"""The engine with draft trees emits what the target emits alone. It drafts and accepts what a plain
reference without any cache does."""

from dataclasses import replace

import pytest
from oracle import end_at
from refusals import refused
from tiny import make_drafter, random_prompts
from tree_reference import accepted_as_the_reference

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PROMPTS = random_prompts(5)
K = 4


@pytest.mark.parametrize("nodes", [1, 3, 8, 20])
def test_it_is_the_reference(target: Target, drafters: dict[str, Drafter], nodes: int) -> None:
    drafter = drafters["p-eagle"]
    assert accepted_as_the_reference(target, drafter, PROMPTS[:3], nodes, K) > 3


LENGTHS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 1, 33, 7, 26)]
MANY = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "seeded penalties": {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5, "top_p": 0.9},
    "bias": {"logit_bias": {20: 2.0, 30: -4.0}, "temperature": 0.5, "seed": 1},
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize(("nodes", "max_batch"), [(3, 5), (12, 1), (12, 3), (40, 2)])
def test_the_same_tokens_as_alone(
    target: Target, drafters: dict[str, Drafter], kind: str, nodes: int, max_batch: int
) -> None:
    params = [replace(own, **MANY[kind]) for own in LENGTHS]
    alone = LLM(target, max_batch=2, lookup=False).generate(PROMPTS, params)
    done = LLM(target, drafters["p-eagle"], nodes=nodes, max_batch=max_batch)
    found = done.generate(PROMPTS, params)
    assert [a.token_ids for a in found] == [a.token_ids for a in alone]
    assert sum(sum(a.stats.accepted) for a in found) > 3


def test_logprobs_are_those_of_the_path(target: Target, drafters: dict[str, Drafter]) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3)
    alone = LLM(target, lookup=False).generate(PROMPTS, params)
    found = LLM(target, drafters["p-eagle"], nodes=12).generate(PROMPTS, params)
    for one, other in zip(alone, found, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token == theirs.token
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_an_answer_ends_within_a_path(
    target: Target, drafters: dict[str, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(target, drafters["p-eagle"], nodes=12)
    params = SamplingParams(max_tokens=40)
    said = LLM(target, lookup=False).generate(PROMPTS, replace(params, ignore_eos=True))
    end_at(monkeypatch, target, *{answer.token_ids[9] for answer in said})
    alone = LLM(target, lookup=False).generate(PROMPTS, params)
    found = llm.use(drafters["p-eagle"], nodes=12).generate(PROMPTS, params)
    assert [(a.token_ids, a.finish_reason) for a in found] == [
        (a.token_ids, a.finish_reason) for a in alone
    ]
    assert any(a.finish_reason == "stop" for a in found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_preemption(target: Target, drafters: dict[str, Drafter], deterministic: bool) -> None:
    """Few blocks: requests are started again, and prompts that begin alike are reused."""
    start = random_prompts(1, longest=50)[0] * 2
    prompts = [[*start[:40], token, 9, 8] for token in range(20, 28)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    alone = LLM(target, deterministic=deterministic, lookup=False).generate(prompts, params)
    llm = LLM(target, deterministic=deterministic)
    llm = llm.use(drafters["p-eagle"], nodes=9, kv_tokens=400, max_batch=8)
    run = llm.stream(prompts, params)
    list(run)
    assert [a.token_ids for a in run.completions()] == [a.token_ids for a in alone]
    assert sum(request.preempted for request in run.requests) > 0
    assert sum(request.num_cached_tokens for request in run.requests) > 0


def test_the_context_ends(target: Target, drafters: dict[str, Drafter]) -> None:
    """Slots of a tree may lie behind the context's end, positions never."""
    prompt = (random_prompts(1)[0] * 100)[: target.max_context - 12]
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    alone = LLM(target, lookup=False).generate([prompt], params)[0]
    found = LLM(target, drafters["p-eagle"], nodes=40).generate([prompt], params)[0]
    assert found.token_ids == alone.token_ids and len(found.token_ids) == 12


@pytest.mark.parametrize("nodes", [4, 16])
def test_grammars_prune_branches(target: Target, drafters: dict[str, Drafter], nodes: int) -> None:
    params = SamplingParams(max_tokens=40, regex="(cat|hat|the mat|that|then) [a-z]{3,9}(;|!) *")
    alone = LLM(target, lookup=False).generate(PROMPTS, params)
    found = LLM(target, drafters["p-eagle"], nodes=nodes).generate(PROMPTS, params)
    assert [a.token_ids for a in found] == [a.token_ids for a in alone]
    assert sum(sum(a.stats.accepted) for a in found) > 3


@pytest.mark.parametrize("moves", [True, False])
def test_moves_are_read_again(target: Target, monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    """A head that likes the second best: what is accepted is never the chain that stands first, so
    keys, values and features must move. A cache that does not move them is noticed."""
    drafter = make_drafter(target, "p-eagle", seed=4)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    alone = LLM(target, lookup=False).generate(PROMPTS, params)
    run = LLM(target, drafter, nodes=60).stream(PROMPTS, params)
    if not moves:
        monkeypatch.setattr(type(run.engine.cache), "move", lambda *_: None)
    list(run)
    same = [a.token_ids for a in run.completions()] == [a.token_ids for a in alone]
    assert same == moves


@pytest.mark.parametrize("given", [{"nodes": 0}, {"nodes": 257}, {"nodes": 8, "k": 3}])
def test_wrong_numbers(target: Target, given: dict[str, int]) -> None:
    with refused("nodes"):
        LLM(target, make_drafter(target, "p-eagle"), **given)


def test_eagle3_drafts_chains(target: Target) -> None:
    with refused("nodes"):
        LLM(target, make_drafter(target, "eagle3"), nodes=8)
    assert LLM(target, make_drafter(target, "eagle3")).drafting.lookup, "beside its chain"
