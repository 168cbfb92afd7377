"""The engine's draft equals the slot table computed from scratch, without any cache."""

from typing import Any

import pytest
import torch
from tiny import METHODS, features_of, make_drafter, make_target, random_prompts
from torch import Tensor
from tree_reference import place_states

from peagle.backends.batch import Batch
from peagle.engine.budget import Ask, Round
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PROMPTS = random_prompts(6)
NORMS = {"norm_before_residual": True, "norm_output": True}
CASES = [({}, 1, 2), ({}, 8, 4), (NORMS, 3, 1), ({"fc_norm": True}, 4, 3)]  # flags, K, batch


def draft_tokens(drafter: Drafter, normed: Tensor) -> list[int]:
    """The likeliest target ids of slots."""
    best: list[int] = drafter.target_ids[drafter.logits(normed).argmax(-1)].tolist()
    return best


def parallel(drafter: Drafter, target: Target, tokens: list[int], k: int) -> list[int]:
    """Real slots, then k − 1 placeholders; the last k predict."""
    return draft_tokens(drafter, place_states(drafter, target, tokens, k))


def autoregressive(drafter: Drafter, target: Target, tokens: list[int], k: int) -> list[int]:
    """K forwards over everything; the hidden state of a slot is the feature of the next."""
    ids = torch.tensor(tokens[1:])
    features = drafter.project(features_of(target, drafter, tokens[:-1]))
    drafts = list[int]()
    for _ in range(k):
        out = drafter(ids, features, torch.arange(len(ids)), CausalAttend())
        drafts += draft_tokens(drafter, out.normed[-1:])
        ids = torch.cat([ids, torch.tensor(drafts[-1:])])
        features = torch.cat([features, out.recurrent[-1:]])
    return drafts


BRUTE_FORCE = {"p-eagle": parallel, "eagle3": autoregressive}


@pytest.mark.parametrize(("method", "passes"), [("p-eagle", 1), ("eagle3", 4)])
def test_the_budget_learns_the_rows_that_ran(
    target: Target,
    drafters: dict[str, Drafter],
    method: str,
    passes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P-EAGLE drafts in one pass, EAGLE-3 in one for each token."""
    engine = LLM(target, drafters[method], k=4, lookup=False).engine
    learned, ran = list[Round](), list[tuple[object, int]]()
    monkeypatch.setattr(engine.budget, "learn", learned.append)
    assert engine.proposer is not None
    models: list[Any] = [engine.model, engine.proposer.model]
    for model in models:

        def forward(batch: Batch, *args: Any, model: Any = model, run: Any = model.forward) -> Any:
            ran.append((model, len(batch.ids)))
            return run(batch, *args)

        monkeypatch.setattr(model, "forward", forward)
    [request] = LLM(target, lookup=False).make_requests(
        PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True)
    )
    engine.add(request)
    while not engine.idle:
        ran.clear()
        count = len(learned)
        engine.step()
        verified, drafted = ([rows for model, rows in ran if model is one] for one in models)
        for costs in learned[count:]:
            assert ([costs.rows], costs.drafter_rows) == (verified, drafted)
    assert {len(costs.drafter_rows) for costs in learned[:-3]} == {passes}


def test_the_budget_knows_which_prompts_are_being_read(
    target: Target, p_eagle: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, decode = LLM(target, p_eagle, k=3), list[list[bool]]()
    engine, choose = llm.engine, llm.engine.budget.choose
    engine.scheduler.budget = 20

    def noted(load: int, asks: list[Ask], found: list[float]) -> list[int]:
        decode.append([ask.decodes for ask in asks])
        return choose(load, asks, found)

    monkeypatch.setattr(engine.budget, "choose", noted)
    llm.generate([[7] * 50], SamplingParams(max_tokens=3, ignore_eos=True))
    assert decode[:3] == [[False], [False], [True]]


def check_rounds(target: Target, drafter: Drafter, k: int, max_batch: int) -> tuple[int, int]:
    """Compare after every round; returns drafts compared, and how many of them differ."""
    llm = LLM(target, drafter, k=k, max_batch=max_batch)
    run = llm.stream(PROMPTS, [SamplingParams(max_tokens=n) for n in (9, 17, 5, 14, 3, 11)])
    compared = []
    running = run.engine.scheduler.running
    while any(request.finish_reason is None for request in run.requests):
        run.step()
        with torch.no_grad():
            for request in running:
                brute = BRUTE_FORCE[drafter.config.method](drafter, target, request.tokens, k)
                assert request.draft.tokens == brute, (request.index, len(request.tokens))
                compared.append(tuple(brute))
    return len(compared), len(set(compared))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("flags", "k", "max_batch"), CASES)
def test_random_heads(method: str, flags: dict[str, bool], k: int, max_batch: int) -> None:
    target = make_target(seed=2, spread=0.3)
    compared, distinct = check_rounds(target, make_drafter(target, method, **flags), k, max_batch)
    assert compared > 30 and distinct > 10


@pytest.mark.parametrize("max_batch", [1, 3])
def test_heads_that_are_accepted(target: Target, drafter: Drafter, max_batch: int) -> None:
    """Rounds that keep several slots at once, and rows used again by later requests."""
    compared, distinct = check_rounds(target, drafter, 4, max_batch)
    assert compared > 20 and distinct > 10
