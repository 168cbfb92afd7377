"""The engine with draft trees emits what the target emits alone. It drafts and accepts what a plain
reference without any cache does."""

from dataclasses import replace

import pytest
from answers import accepted, alone, outcome, token_ids
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
def test_it_is_the_reference(target: Target, p_eagle: Drafter, nodes: int) -> None:
    assert accepted_as_the_reference(target, p_eagle, PROMPTS[:3], nodes, K) > 3


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
    target: Target, p_eagle: Drafter, kind: str, nodes: int, max_batch: int
) -> None:
    params = [replace(own, **MANY[kind]) for own in LENGTHS]
    found = LLM(target, p_eagle, nodes=nodes, max_batch=max_batch).generate(PROMPTS, params)
    assert token_ids(found) == token_ids(alone(target, PROMPTS, params, max_batch=2))
    assert accepted(found) > 3


def test_logprobs_are_those_of_the_path(target: Target, p_eagle: Drafter) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3)
    found = LLM(target, p_eagle, nodes=12).generate(PROMPTS, params)
    for one, other in zip(alone(target, PROMPTS, params), found, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token == theirs.token
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_an_answer_ends_within_a_path(
    target: Target, p_eagle: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=40)
    said = alone(target, PROMPTS, replace(params, ignore_eos=True))
    end_at(monkeypatch, target, *{answer.token_ids[9] for answer in said})
    found = LLM(target, p_eagle, nodes=12).generate(PROMPTS, params)
    assert outcome(found) == outcome(alone(target, PROMPTS, params))
    assert any(a.finish_reason == "stop" for a in found)


@pytest.mark.parametrize("deterministic", [False, True])
def test_preemption(target: Target, p_eagle: Drafter, deterministic: bool) -> None:
    """Few blocks: requests are started again, and prompts that begin alike are reused."""
    start = random_prompts(1, longest=50)[0] * 2
    prompts = [[*start[:40], token, 9, 8] for token in range(20, 28)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    wanted = alone(target, prompts, params, deterministic=deterministic)
    llm = LLM(target, deterministic=deterministic)
    run = llm.use(p_eagle, nodes=9, kv_tokens=400, max_batch=8).stream(prompts, params)
    list(run)
    assert token_ids(run.completions()) == token_ids(wanted)
    assert sum(request.preempted for request in run.requests) > 0
    assert sum(request.num_cached_tokens for request in run.requests) > 0


def test_the_context_ends(target: Target, p_eagle: Drafter) -> None:
    """Slots of a tree may lie behind the context's end, positions never."""
    prompt = (random_prompts(1)[0] * 100)[: target.max_context - 12]
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    found = LLM(target, p_eagle, nodes=40).generate([prompt], params)
    assert token_ids(found) == token_ids(alone(target, [prompt], params))
    assert len(found[0].token_ids) == 12


@pytest.mark.parametrize("nodes", [4, 16])
def test_grammars_prune_branches(target: Target, p_eagle: Drafter, nodes: int) -> None:
    params = SamplingParams(max_tokens=40, regex="(cat|hat|the mat|that|then) [a-z]{3,9}(;|!) *")
    found = LLM(target, p_eagle, nodes=nodes).generate(PROMPTS, params)
    assert token_ids(found) == token_ids(alone(target, PROMPTS, params))
    assert accepted(found) > 3


@pytest.mark.parametrize("moves", [True, False])
def test_moves_are_read_again(target: Target, monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    """A head that likes the second best: what is accepted is never the chain that stands first, so
    keys, values and features must move. A cache that does not move them is noticed."""
    drafter = make_drafter(target, "p-eagle", seed=4)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    wanted = alone(target, PROMPTS, params)
    run = LLM(target, drafter, nodes=60).stream(PROMPTS, params)
    if not moves:
        monkeypatch.setattr(type(run.engine.cache), "move", lambda *_: None)
    list(run)
    assert (token_ids(run.completions()) == token_ids(wanted)) == moves


@pytest.mark.parametrize("given", [{"nodes": 0}, {"nodes": 257}, {"nodes": 8, "k": 3}])
def test_wrong_numbers(target: Target, given: dict[str, int]) -> None:
    with refused("nodes"):
        LLM(target, make_drafter(target, "p-eagle"), **given)


def test_eagle3_drafts_chains(target: Target) -> None:
    with refused("nodes"):
        LLM(target, make_drafter(target, "eagle3"), nodes=8)
    assert LLM(target, make_drafter(target, "eagle3")).drafting.lookup, "beside its chain"
