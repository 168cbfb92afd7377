"""Greedy decoding with speculation gives the very tokens, texts and endings of decoding without."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from answers import accepted, alone, outcome
from oracle import Oracle
from refusals import refused
from tiny import make_drafter, make_target, random_prompts

from peagle.backends.batch import Batch
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.engine.run import Completion
from peagle.errors import InputWarning
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target, TargetOutput

PROMPTS = random_prompts(7)


def total(done: list[Completion]) -> Stats:
    stats = Stats()
    for completion in done:
        stats += completion.stats
    return stats


LENGTHS = [SamplingParams(max_tokens=n) for n in (20, 1, 33, 7, 26, 2, 40)]


@pytest.fixture(scope="module")
def plain(target: Target) -> list[tuple[list[int], str, str]]:
    """The target's answers to PROMPTS without drafting."""
    return outcome(alone(target, PROMPTS, LENGTHS, max_batch=3))


@pytest.mark.parametrize(("k", "max_batch"), [(1, 4), (2, 1), (3, 3), (4, 2), (5, 5), (8, 3)])
def test_equals_plain_for_every_k_and_batch(
    target: Target, drafter: Drafter, plain, k: int, max_batch: int
) -> None:
    done = LLM(target, drafter, k=k, max_batch=max_batch).generate(PROMPTS, LENGTHS)
    assert outcome(done) == plain
    assert sum(sum(c.drafted) for c in done) <= accepted(done)
    assert 10 < accepted(done) < total(done).drafted, "some drafts right, some wrong"


def test_plain_is_the_argmax_without_a_cache(target: Target) -> None:
    done = alone(target, PROMPTS[:3], SamplingParams(max_tokens=15))
    for prompt, completion in zip(PROMPTS, done, strict=False):
        ids = torch.tensor(prompt + completion.token_ids)
        hidden = target.forward(ids, torch.arange(len(ids)), CausalAttend()).hidden
        best = target.logits(hidden).argmax(-1).tolist()
        assert completion.token_ids == best[len(prompt) - 1 : -1]


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_counts_equal_hand_counts(
    target: Target, p_eagle: Drafter, oracle: Oracle, error_rate: float, max_batch: int
) -> None:
    k, length = 5, 23
    oracle.futures = futures(target, length + k)
    oracle.error_rate = error_rate
    llm = LLM(target, p_eagle, k=k, max_batch=max_batch)
    done = llm.generate(LONG, SamplingParams(max_tokens=length))
    for which, completion in enumerate(done):
        assert completion.token_ids == oracle.futures[which][len(LONG[which]) :][:length]
        stats, hits = completion.stats, oracle.hits[which]
        assert stats.rounds == len(hits)
        assert stats.accepted == oracle.accepted(which, k), "counted before truncation"
        assert stats.acceptance_length == 1 + sum(hits) / len(hits)
        flags = [False] + [flag for n in hits for flag in [True] * n + [False]]
        assert completion.drafted == flags[:length]
    assert total(done).drafted == oracle.drafted
    if error_rate == 0:
        assert done[0].stats.rounds == 4  # 1 + 6 + 6 + 6 + 6 ≥ 23
        assert done[0].stats.acceptance_length == 6
    if error_rate == 1:
        assert done[0].stats.acceptance_length == 1 and done[0].stats.rounds == length - 1


LONG = [prompt for prompt in random_prompts(12, seed=5) if len(prompt) > 2][:5]


def futures(target: Target, length: int) -> list[list[int]]:
    """Prompts of LONG with their true greedy continuations."""
    done = alone(target, LONG, SamplingParams(max_tokens=length, ignore_eos=True))
    return [p + c.token_ids for p, c in zip(LONG, done, strict=True)]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("error_rate", [0.0, 0.3])
def test_context_limit(
    p_eagle: Drafter, oracle: Oracle, k: int, error_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output ends where the context does, and nothing ever runs at or behind its end."""
    limit = 20
    small, roomy = make_target(context=limit), make_target(context=limit + 40)
    oracle.futures, oracle.error_rate, oracle.context = futures(roomy, 40), error_rate, limit
    reached = list[int]()
    llm = LLM(small, p_eagle, k=k, max_batch=2)
    model = llm.engine.model
    forward = model.forward

    def noted(batch: Batch, *others: Any) -> TargetOutput:
        reached.append(int(batch.positions.max()))
        return forward(batch, *others)

    monkeypatch.setattr(model, "forward", noted)
    done = llm.generate(LONG, SamplingParams())
    for which, (prompt, completion) in enumerate(zip(LONG, done, strict=True)):
        assert completion.token_ids == oracle.futures[which][len(prompt) : limit]
        assert completion.finish_reason == "length"
        seen = len(completion.stats.accepted)
        assert completion.stats.accepted == oracle.accepted(which, k)[:seen]
    assert max(reached) <= limit - 1


def test_real_heads_at_the_context_limit(drafter: Drafter) -> None:
    small = make_target(context=20)
    plain = outcome(LLM(small).generate(LONG, SamplingParams()))
    assert outcome(LLM(small, drafter, k=6).generate(LONG, SamplingParams())) == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_a_head_lookup_drafts(target: Target, temperature: float) -> None:
    """Unless it is refused or a chain is asked for, with the same tokens. A repeated prompt is
    where it drafts."""
    llm = LLM(target, nodes=8)
    assert llm.drafting == Drafting("lookup", None, 8, lookup=True)
    adaptive = LLM(target)
    assert adaptive.drafting == Drafting("lookup", None, lookup=True)
    for plain in (LLM(target, lookup=False), LLM(target, k=3), llm.use(None, lookup=False)):
        assert (plain.drafting, plain.engine.settings.k) == (Drafting(), 0)
    prompts = [prompt * 4 for prompt in PROMPTS]
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    wanted = outcome(plain.generate(prompts, params))
    done = llm.generate(prompts, params)
    assert outcome(done) == wanted == outcome(adaptive.generate(prompts, params))
    assert total(done).rounds > 0


def test_k_above_the_trained_one_warns_once(target: Target, p_eagle: Drafter) -> None:
    trained = p_eagle.config.depths
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        llm = LLM(target, p_eagle, k=trained)
        assert not said
        for _ in range(2):
            llm.use(p_eagle, trained + 1)
        LLM(target, p_eagle, k=trained + 1)
    [warning] = said
    assert warning.category is InputWarning
    assert f"K = {trained + 1}, but the head was trained for {trained} " in str(warning.message)


def test_a_head_of_unknown_depth_drafts_as_deep_as_it_is_asked(target: Target) -> None:
    """AWS's heads do not record how many tokens they were trained for."""
    drafter = make_drafter(target, "p-eagle")
    assert drafter.config.depths is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LLM(target, drafter).engine.settings.k == 7
        llm = LLM(target, drafter, k=18)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert outcome(llm.generate(PROMPTS, params)) == outcome(alone(target, PROMPTS, params))


def test_k_is_as_deep_as_the_head_was_trained(target: Target) -> None:
    drafter = make_drafter(target, "p-eagle")
    drafter.config = replace(drafter.config, depths=12)
    assert LLM(target, drafter).engine.settings.k == 12


def test_no_prompts(target: Target) -> None:
    assert LLM(target).generate([]) == []


def test_prompts_as_text_and_ids(target: Target) -> None:
    llm = LLM(target)
    ids = llm.tokenizer("the cat")["input_ids"]
    one, two = llm.generate(["the cat", ids], SamplingParams(max_tokens=5))
    assert one.token_ids == two.token_ids and one.text == llm.tokenizer.decode(one.token_ids)
    [alone] = llm.generate("the cat", SamplingParams(max_tokens=5))
    assert alone.token_ids == one.token_ids


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([[7], []], "prompt[1]"),
        ([""], "prompt[0]"),
        (["a", "caf\udce9"], "prompt[1]"),  # a byte of the command line that is no UTF-8
        ([[7] * 256], "prompt[0]"),
        ([[7, 7.5]], "prompt[0]"),
        ([[{"role": "user", "content": "the cat"}]], "prompt[0]"),
    ],
)
def test_bad_prompts(target: Target, prompts: list[Any], field: str) -> None:
    with refused(field):
        LLM(target).generate(prompts)


def test_bad_arguments(target: Target) -> None:
    with refused("params"):
        LLM(target).generate([[7]], [SamplingParams()] * 2)
    with pytest.raises(AssertionError, match="iterate to the end"):
        LLM(target).stream([[7]], None).completions()
