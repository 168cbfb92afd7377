"""Sampling parameters through the whole engine: with drafts as without."""

import pkgutil
from dataclasses import replace

import pytest
import torch
from answers import accepted, alone, outcome
from chisquare import naive_logits
from refusals import refused
from tiny import METHODS, make_target, random_prompts

from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PROMPTS = random_prompts(6, seed=4)
BIAS = {70: 2.0, 80: -100.0, 90: 0.5}
SPECIAL = [
    SamplingParams(max_tokens=30, repetition_penalty=1.3),
    SamplingParams(max_tokens=30, presence_penalty=0.6, frequency_penalty=0.4),
    SamplingParams(max_tokens=30, frequency_penalty=-0.5, logit_bias=BIAS),
    SamplingParams(max_tokens=30, logprobs=2),
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=30, logit_bias=BIAS, repetition_penalty=1.1, logprobs=0),
]


def target_rows(target: Target, ids: list[int]) -> torch.Tensor:
    """Logits (len(ids), V), from one forward without a cache."""
    hidden = target.forward(torch.tensor(ids), torch.arange(len(ids)), CausalAttend()).hidden
    return target.logits(hidden).double()


@pytest.mark.parametrize(("k", "max_batch"), [(1, 6), (3, 2), (4, 6)])
def test_greedy_is_what_it_is_without_drafts(
    target: Target, drafter: Drafter, k: int, max_batch: int
) -> None:
    done = LLM(target, drafter, k=k, max_batch=max_batch).generate(PROMPTS, SPECIAL)
    assert outcome(done) == outcome(alone(target, PROMPTS, SPECIAL, max_batch=3))
    assert accepted(done) > 10


def test_greedy_is_the_argmax_of_the_definition(target: Target) -> None:
    done = LLM(target, max_batch=6).generate(PROMPTS, SPECIAL)
    for prompt, params, answer in zip(PROMPTS, SPECIAL, done, strict=True):
        rows = target_rows(target, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        for i, (row, token) in enumerate(zip(rows, answer.token_ids, strict=True)):
            naive = naive_logits(row.numpy(), params, prompt, answer.token_ids[:i])
            assert token == naive.argmax()


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("method", [*METHODS, "none"])
def test_logprobs_are_the_targets_own(
    target: Target, drafters: dict[str, Drafter], method: str, temperature: float
) -> None:
    params = SamplingParams(
        max_tokens=25, temperature=temperature, seed=2, logprobs=3, repetition_penalty=1.2
    )
    run = LLM(target, drafters.get(method), max_batch=4).stream(PROMPTS, params)
    chunks = list(run)
    for index, (prompt, answer) in enumerate(zip(PROMPTS, run.completions(), strict=True)):
        rows = target_rows(target, prompt + answer.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
        assert answer.logprobs is not None
        assert [entry.token for entry in answer.logprobs] == answer.token_ids
        for entry, row in zip(answer.logprobs, rows, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
            assert [v for _, v in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert [c.logprob for c in chunks if c.index == index] == answer.logprobs


def test_logprobs_are_given_only_where_asked_for(target: Target) -> None:
    run = LLM(target).stream(PROMPTS[:1], SamplingParams(max_tokens=5))
    assert [chunk.logprob for chunk in run] == [None] * 5
    assert run.completions()[0].logprobs is None


@pytest.mark.parametrize("seed", [None, 11])
def test_several_answers_a_prompt(target: Target, p_eagle: Drafter, seed: int | None) -> None:
    """Each is what its seed gives alone; they follow their prompt's order."""
    llm = LLM(target, p_eagle, k=3, max_batch=4)
    params = [
        SamplingParams(temperature=1.2, max_tokens=12, seed=seed, n=3),
        SamplingParams(temperature=1.2, max_tokens=12, seed=seed),
    ]
    run = llm.stream(PROMPTS[:2], params)
    chunks, done = list(run), run.completions()
    assert len(done) == 4 and len({tuple(c.token_ids) for c in done}) > (3 if seed else 1)
    said = {i for i, answer in enumerate(done) if answer.text}
    assert {chunk.index for chunk in chunks} == said
    if seed is not None:
        for i, answer in enumerate(done):
            prompt, own = (PROMPTS[0], seed + i) if i < 3 else (PROMPTS[1], seed)
            alone = llm.generate([prompt], replace(params[1], seed=own))[0]
            assert outcome([alone]) == outcome([answer])


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_stop_token_ids(target: Target, p_eagle: Drafter, at: int) -> None:
    """The answer ends with the first of them, which has no text, though the end is ignored."""
    unstopped = LLM(target).generate(PROMPTS[:1], SamplingParams(max_tokens=20))[0]
    token = unstopped.token_ids[at]
    first = unstopped.token_ids.index(token)
    params = SamplingParams(max_tokens=20, stop_token_ids=(3, token), ignore_eos=True)
    for head in (None, p_eagle):
        done = LLM(target, head).generate(PROMPTS[:1], params)[0]
        assert done.finish_reason == "stop"
        assert done.token_ids == unstopped.token_ids[: first + 1]
        ids = unstopped.token_ids[:first]
        assert done.text == target.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={128: 1}), "logit_bias"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
        (SamplingParams(regex="("), "regex"),
    ],
)
def test_impossible_requests_are_refused(
    target: Target, params: SamplingParams, field: str
) -> None:
    with refused(field):
        LLM(target).stream(PROMPTS[:1], params)


def test_a_broken_target_is_noticed() -> None:
    target = make_target(seed=5)
    with torch.no_grad():
        target.model.lm_head.weight[3] = float("nan")
    for params in (SamplingParams(), SamplingParams(temperature=1, n=2), SPECIAL[0]):
        with pytest.raises(RequestFailure, match="answer 0: .*NaN"):
            LLM(target).generate(PROMPTS[:1], params)


@pytest.mark.parametrize("part", ["peagle.engine.text.TextStream.push", "commit"])
def test_an_error_of_one_request_ends_it_alone(
    target: Target, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its text, its sampler or its grammar raises."""
    prompts = PROMPTS[:3]
    wanted = LLM(target).generate(prompts)
    name = part if "." in part else f"peagle.engine.sampling.Sampler.{part}"
    taken = pkgutil.resolve_name(name)
    broken = list[object]()

    def breaks(self: object, *args: object) -> object:
        broken.append(self)
        if len(broken) > 1 and self is broken[1]:  # of the second request
            raise ValueError("Invalid prefix encountered")
        return taken(self, *args)

    monkeypatch.setattr(name, breaks)
    run = LLM(target).stream(prompts)
    assert len(list(run)) > 1
    found = run.completions()
    [failed] = [one for one in found if one.finish_reason == "error"]
    assert failed.failure == "Invalid prefix encountered"
    for one, other in zip(found, wanted, strict=True):
        assert one is failed or one.text == other.text


def test_a_prompt_that_no_cache_holds(target: Target) -> None:
    """The error has its number among the prompts, which may get several answers each."""
    several = SamplingParams(temperature=1, max_tokens=20, n=3)
    llm = LLM(target, lookup=False, kv_tokens=48)
    for params in (several, [several, replace(several, n=1)]):
        with refused("prompt[1]"):
            llm.generate([[5], [5] * 40], params)


@pytest.mark.parametrize("token", [-1, 128])
def test_tokens_that_the_target_does_not_have(target: Target, token: int) -> None:
    with refused("prompt[1]") as caught:
        LLM(target).stream([[5], [5, token]])
    assert caught.value.value == token
