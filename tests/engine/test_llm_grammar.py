"""Answers that follow a grammar: always valid, of the target's law, and drafted through it."""

import json
import random
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from answers import accepted, alone, outcome, token_ids
from oracle import end_at
from pydantic import BaseModel, ConfigDict, Field, create_model
from tiny import METHODS, make_drafter, make_target, random_prompts

from peagle.engine.grammar import Matcher
from peagle.engine.grammars import Grammars
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.drafter import Drafter
from peagle.model.target import Target

KNOWN = range(16, 128)  # what the drafters know, so not every digit or sign of JSON


def random_model(rng: random.Random, depth: int = 0) -> type[BaseModel]:
    """A record of one to three fields, strict; every answer to its schema is short."""
    fields: dict[str, Any] = {}
    for i in range(rng.randint(1, 3)):
        kinds: list[Any] = [
            (str, Field(max_length=rng.randint(0, 6))),
            (int, Field(ge=rng.randint(-20, 0), le=rng.randint(1, 300))),
            (bool, ...),
            (Literal["red", "the cat", "A"], ...),
            (list[bool], Field(max_length=2)),
            (int | None, Field(ge=0, le=9, default=None)),
        ]
        if depth < 2:
            kinds += [(random_model(rng, depth + 1), ...)]
            kinds += [(list[random_model(rng, depth + 1)], Field(min_length=1, max_length=2))]
        fields[rng.choice("xyz") + str(i)] = rng.choice(kinds)
    strict = ConfigDict(strict=True, extra="forbid")
    return create_model(f"Record{depth}{rng.randrange(10**6)}", __config__=strict, **fields)


MODELS = [random_model(random.Random(seed)) for seed in range(20)]


@pytest.fixture(scope="module")
def wide() -> Target:
    """Room for white space, which a random target likes."""
    return make_target(seed=2, spread=0.3, context=2048)


@pytest.fixture(scope="module")
def grammars(wide: Target) -> Grammars:
    """Grammars shared by all tests: each is compiled once, matchers are not shared."""
    return Grammars(wide)


@pytest.fixture(scope="module")
def wide_drafters(wide: Target) -> dict[str, Drafter]:
    return {method: make_drafter(wide, method, draft_vocab=len(KNOWN)) for method in METHODS}


def schema(model: type[BaseModel], **options: object) -> str:
    return json.dumps({**model.model_json_schema(), "x-guidance": options})


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("method", [*METHODS, "none"])
def test_json_always_parses_and_validates(
    wide: Target, wide_drafters: dict[str, Drafter], method: str, temperature: float
) -> None:
    how: dict[str, Any] = {"lookup": False} if method == "none" else {"lookup": True, "nodes": 8}
    llm = LLM(wide, wide_drafters.get(method), max_batch=8, **how)
    # A greedy random target says the same white space again and again.
    options = {} if temperature else {"whitespace_flexible": False}
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=1500,
            seed=seed,
            json_schema=schema(model, **options),
        )
        for seed, model in enumerate(MODELS)
    ]
    done = llm.generate(random_prompts(20), params)
    for model, answer in zip(MODELS, done, strict=True):
        assert answer.finish_reason == "stop"
        model.model_validate_json(answer.text)
    assert len({answer.text for answer in done}) > 10
    assert (accepted(done) > 0) == (method != "none")


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_answers_are_what_they_are_without_drafts(
    wide: Target, wide_drafters: dict[str, Drafter], method: str, k: int, temperature: float
) -> None:
    asked = [
        SamplingParams(max_tokens=60, json_schema=schema(MODELS[0])),
        SamplingParams(max_tokens=60, regex="[a-z ]{20,40}!"),
        SamplingParams(max_tokens=60),
        SamplingParams(max_tokens=60, regex="[a-f]+", repetition_penalty=1.5, logit_bias={70: 3}),
        SamplingParams(max_tokens=60, grammar='start: "(" start ")" | /[0-9]{1,9}/'),
    ]
    params = [replace(one, temperature=temperature, seed=7) for one in asked]
    prompts = random_prompts(len(params), seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # K above what the head was trained for
        done = LLM(wide, wide_drafters[method], k=k, max_batch=3).generate(prompts, params)
    assert outcome(done) == outcome(alone(wide, prompts, params, max_batch=3))


def test_any_end_token_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(seed=7, layers=1)
    end_at(monkeypatch, target, 0, 90)
    params = SamplingParams(temperature=2, regex="X{3}", n=60, seed=0)
    llm = LLM(target, make_drafter(target, "p-eagle", layers=1), k=5, max_batch=60)
    done = llm.generate([[70, 71]], params)
    assert {(c.text, c.finish_reason, len(c.token_ids)) for c in done} == {("XXX", "stop", 4)}
    assert {c.token_ids[-1] for c in done} == {0, 2, 90}


def drafted_by_hand(
    logits: torch.Tensor, target_ids: list[int], matcher: Matcher, ends: set[int]
) -> list[int]:
    """The likeliest allowed token of each row in turn, on a matcher that really advances."""
    draft = list[int]()
    for row in logits:
        allowed = set(matcher.allowed().nonzero()[:, 0].tolist())
        known = [(float(v), t) for v, t in zip(row, target_ids, strict=True) if t in allowed]
        if not known and len(allowed) > 1:
            break
        draft.append(max(known)[1] if known else next(iter(allowed)))
        if draft[-1] in ends:
            break
        matcher.advance(draft[-1:])
    return draft


def test_drafts_are_the_likeliest_that_are_allowed(
    wide: Target,
    wide_drafters: dict[str, Drafter],
    grammars: Grammars,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P-EAGLE's K slots in order; what a request without a grammar beside it drafts is the same."""
    drafter, seen, kinds = wide_drafters["p-eagle"], list[torch.Tensor](), Counter[str]()
    forward = Drafter.logits

    def spy(self: Drafter, normed: torch.Tensor) -> torch.Tensor:
        seen.append(forward(self, normed))
        return seen[-1]

    monkeypatch.setattr(Drafter, "logits", spy)
    params = [SamplingParams(max_tokens=40, json_schema=schema(m)) for m in MODELS[:6]]
    params += [SamplingParams(max_tokens=40)]
    run = LLM(wide, drafter, k=6, max_batch=7).stream(random_prompts(7), params)
    known = drafter.target_ids.tolist()
    run.step()
    while not run.engine.idle:
        running = run.engine.scheduler.running
        by_request = seen[-1].unflatten(0, (-1, 6))
        for request, logits in zip(running, by_request, strict=False):
            matcher = grammars.matcher(request.params)
            if matcher is None:
                assert request.draft.tokens == [known[i] for i in logits.argmax(-1)]
                kinds["free"] += 1
                continue
            matcher.advance(request.output)
            assert request.draft.tokens == drafted_by_hand(logits, known, matcher, {2})
            kinds["short"] += len(request.draft) < 6
            kinds["forced"] += any(token not in KNOWN for token in request.draft.tokens)
            kinds["ended"] += 2 in request.draft.tokens
        run.step()
    assert min(kinds[k] for k in ("free", "short", "forced", "ended")) > 0, kinds


@pytest.mark.parametrize("method", METHODS)
def test_every_drafted_token_is_allowed_and_nothing_is_left_behind(
    wide: Target, wide_drafters: dict[str, Drafter], grammars: Grammars, method: str
) -> None:
    llm = LLM(wide, wide_drafters[method], k=5, max_batch=4)
    params = [SamplingParams(max_tokens=40, json_schema=schema(m)) for m in MODELS[6:12]]
    run = llm.stream(random_prompts(6), params)
    drafted = 0
    run.step()
    while not run.engine.idle:
        for request in run.engine.scheduler.running:
            fresh, own = grammars.matcher(request.params), request.sampler.matcher
            fresh.advance(request.output)
            assert torch.equal(fresh.allowed(), own.allowed())
            for row, token in zip(fresh.masks(request.draft), request.draft.tokens, strict=False):
                assert row[token]
                drafted += 1
        run.step()
    assert drafted > 50


@pytest.mark.parametrize("method", [*METHODS, "lookup"])
@pytest.mark.parametrize("filtered", [True, False])
def test_lookup_drafts_only_what_the_grammar_allows(
    wide: Target,
    wide_drafters: dict[str, Drafter],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    filtered: bool,
) -> None:
    """Prompt and answer consist of two words, so each pair of words occurred before. In the prompt
    a sign that the grammar refuses follows each pair."""
    llm = LLM(wide, wide_drafters.get(method), nodes=12, lookup=True)
    prompt = wide.tokenizer(" the cat. the the; cat cat! cat the. the cat")["input_ids"]
    words = wide.tokenizer(" the cat")["input_ids"]
    params = SamplingParams(
        max_tokens=240, regex="[a-z ]{1500}", logit_bias=dict.fromkeys(words, 90.0)
    )
    if not filtered:
        monkeypatch.setattr(Matcher, "count_allowed", lambda _, tokens: len(tokens))
    run = llm.stream([prompt], params)
    looked_up = refused = 0
    run.step()
    while not run.engine.idle:
        for request in run.engine.scheduler.running:
            masks = request.sampler.matcher.masks(request.draft)
            rows = request.draft.follow(request.draft.match.tokens)
            looked_up += len(rows)
            for row in rows:
                refused += not masks[request.draft.parents[row - 1], request.draft.tokens[row - 1]]
        run.step()
    assert looked_up > 20 and (refused == 0) == filtered
    assert token_ids(run.completions()) == token_ids(alone(wide, [prompt], params))


def test_only_running_requests_hold_a_grammar(wide: Target) -> None:
    """A copy may take 50 MB: those who wait have not made theirs, and those who end let it go."""
    params = SamplingParams(max_tokens=4, regex="[a-z]{40}")
    run = LLM(wide, max_batch=1, lookup=False).stream([[70, 71]] * 3, params)
    run.step()
    requests = [*run.engine.scheduler.running, *run.engine.scheduler.waiting]
    assert ["_state" in vars(each.sampler.matcher) for each in requests] == [True, False, False]
    while not run.engine.idle:
        run.step()
    assert [request.sampler.matcher for request in requests] == [None] * 3


@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_of_unknown_tokens_leaves_the_calibration_as_it_is(
    wide: Target, wide_drafters: dict[str, Drafter], method: str
) -> None:
    """The head knows none of the tokens that may follow: it drafts the end alone."""
    signs = {wide.tokenizer.convert_tokens_to_ids(sign) for sign in "!#%"}
    assert not signs & set(KNOWN)
    llm = LLM(wide, wide_drafters[method], k=4)
    done = llm.generate([[70, 71]], SamplingParams(max_tokens=40, regex="[!#%]{12}"))[0]
    assert done.stats.drafted == 1 and len(done.text) == 12
    assert llm.engine.budget.calibration(0, 0.1) == pytest.approx(0.1)


def test_a_branch_where_the_grammar_fails_is_not_the_answers(wide: Target) -> None:
    """After Y comes text that no token spells; the target says X, with a draft of both."""
    x, y = wide.tokenizer.convert_tokens_to_ids(["X", "Y"])
    head = make_drafter(wide, "p-eagle")
    with torch.no_grad():
        head.lm_head.weight.zero_()
    params = SamplingParams(
        max_tokens=8, grammar='start: "a" ("X" | "Y" "ë\\\\")', logit_bias={x: 50.0, y: 40.0}
    )
    run = LLM(wide, head, nodes=8, lookup=False).stream([[70, 71]], params)
    drafted = set[int]()
    run.step()
    while not run.engine.idle:
        drafted |= {token for one in run.engine.scheduler.running for token in one.draft.tokens}
        run.step()
    [answer] = run.completions()
    assert {x, y} <= drafted
    assert (answer.text, answer.finish_reason) == ("aX", "stop")


@pytest.mark.parametrize("method", METHODS)
def test_forced_tokens_are_drafted_though_the_head_does_not_know_them(
    wide: Target, wide_drafters: dict[str, Drafter], method: str
) -> None:
    """All of a round's drafts stand when nothing else may be said."""
    params = SamplingParams(max_tokens=40, regex="!#%!#%!#%!#%")
    unknown = wide.tokenizer.convert_tokens_to_ids("#")
    assert unknown not in KNOWN
    done = LLM(wide, wide_drafters[method], k=4).generate([[70, 71]], params)[0]
    assert done.text == "!#%!#%!#%!#%"
    assert sum(done.stats.accepted) == done.stats.drafted == 4 + 4 + 2
    assert done.drafted == [False, *[True] * 4, False, *[True] * 4, False, True, True]
