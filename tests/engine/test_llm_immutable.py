"""An LLM does not change. `use` makes another one, whose engine follows what was changed."""

from functools import partial
from typing import Any

import pytest
from answers import token_ids
from refusals import refused
from tiny import make_drafter, make_target

from peagle.backends.torch import TorchBackend
from peagle.engine.adaptive import AdaptiveBudget
from peagle.engine.engine import Settings
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.setup import MIXED_CHUNKS
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PROMPTS = [[70, 71, 72], [80, 81]]
PARAMS = SamplingParams(max_tokens=12)
SETTINGS = ("target", "drafter", "drafting", "max_batch", "engine", "tokenizer", "something_new")


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_can_be_assigned(target: Target, p_eagle: Drafter, name: str) -> None:
    llm = LLM(target, p_eagle, k=3, max_batch=2, kv_tokens=320)
    before = getattr(llm, name, None)
    for value in (None, 5, before):
        with pytest.raises(AttributeError):
            setattr(llm, name, value)
    assert getattr(llm, name, None) is before


def test_all_settings_are_tried() -> None:
    public = {name for name, value in vars(LLM).items() if isinstance(value, property)}
    assert public <= set(SETTINGS)


def place_of(drafter: Drafter | None) -> int | None:
    """The address of its weights, which an engine's copy shares."""
    return None if drafter is None else drafter.norm.weight.data_ptr()


def facts(llm: LLM) -> dict[str, Any]:
    """Effective settings, read from the parts of an engine."""
    engine = llm.engine
    proposer, scheduler = engine.proposer, engine.scheduler
    settings, trees = engine.settings, llm.drafting.max_nodes
    room = settings.kv_tokens
    chunk = MIXED_CHUNKS["cpu"]
    drafting = (settings.k, trees, llm.drafting.lookup)
    assert settings == Settings(llm.max_batch, room, chunk, *drafting)
    assert len(engine.cache.layers[0][0]) == scheduler.pool.count + 1
    assert scheduler.budget >= llm.max_batch * (settings.k + 1)
    return {
        "head": None if proposer is None else place_of(proposer.model.drafter),
        "layers": engine.taps,
        "k": engine.settings.k,
        "lookahead": scheduler.num_lookahead_tokens,
        "lookup": engine.settings.lookup,
        "adaptive": isinstance(engine.budget, AdaptiveBudget),
        "max_batch": scheduler.max_batch,
        "blocks": scheduler.pool.count,
    }


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"k": 3}, {}),
    ({"k": 1}, {"k": 1, "lookahead": 1}),
    ({"k": None}, {"k": 4, "adaptive": True, "lookahead": 32, "lookup": True}),
    ({"k": None, "nodes": 9, "lookup": False}, {"k": 4, "lookahead": 9}),
    ({"k": 3, "max_batch": 5}, {"max_batch": 5}),
    ({"k": 3, "kv_tokens": 500}, {"blocks": 32}),
    (
        {"k": 2, "max_batch": 1, "kv_tokens": 161},
        {"k": 2, "lookahead": 2, "max_batch": 1, "blocks": 11},
    ),
    ({"head": None, "lookup": False}, {"head": None, "layers": (), "k": 0, "lookahead": 0}),
    (
        {"head": None},
        {"head": None, "layers": (), "k": 0, "lookahead": 32, "lookup": True, "adaptive": True},
    ),  # fmt: skip
    ({"head": "other", "k": 3}, {"head": "other", "layers": (0, 1, 3)}),
]


@pytest.mark.parametrize(("change", "changed"), CHANGES)
def test_use_changes_what_it_is_told_to(
    target: Target, p_eagle: Drafter, change: dict[str, Any], changed: dict[str, Any]
) -> None:
    heads = {"own": p_eagle, "other": make_drafter(target, "eagle3"), None: None}
    llm = LLM(target, p_eagle, k=3, max_batch=2, kv_tokens=320)
    before, engine = facts(llm), llm.engine
    wanted = token_ids(llm.generate(PROMPTS, PARAMS))
    numbers = {"k": 3, "lookahead": 3, "max_batch": 2, "blocks": 20}
    model = {"head": place_of(p_eagle), "layers": (1, 2, 3)}
    assert before == {**model, **numbers, "lookup": False, "adaptive": False}
    asked = {"head": "own"} | change
    used = llm.use(heads[asked.pop("head")], **asked)
    expected = before | changed | {"head": place_of(heads[changed.get("head", "own")])}
    assert used is not llm and used.engine is not engine and facts(used) == expected
    assert used.target is target
    assert token_ids(used.generate(PROMPTS, PARAMS)) == wanted
    assert llm.engine is engine and facts(llm) == before, "the first one is as it was"
    assert token_ids(llm.generate(PROMPTS, PARAMS)) == wanted


def test_use_keeps_the_mode(target: Target, drafter: Drafter) -> None:
    """An LLM is made ready once: those over it run the same model, deterministic or not."""
    exact, fast = LLM(target, deterministic=True), LLM(target)
    for llm in (exact, fast):
        used = llm.use(drafter, 2)
        assert used.engine.model is llm.engine.model
    assert exact.engine.model is not fast.engine.model


def test_a_default_batch_follows_the_head_and_the_cache(target: Target) -> None:
    """One that was asked for stays."""
    llm = LLM(target)
    assert llm.max_batch == 8 and llm.use(None, kv_tokens=256 * 3).max_batch == 3
    assert LLM(target, max_batch=6).use(None, kv_tokens=256 * 3).max_batch == 6


@pytest.mark.parametrize("name", ["k", "max_batch", "kv_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_bad_values(target: Target, p_eagle: Drafter, name: str, value: int) -> None:
    for make in (partial(LLM, target), LLM(target).use):
        with refused(name):
            make(p_eagle, **{name: value})


LOADED = {"dtype": "float32", "device": "cpu", "max_bacth": 4, "quantize": "int8"}


@pytest.mark.parametrize("name", [*LOADED, "backend", "deterministic"])
def test_settings_that_a_target_is_made_with(target: Target, name: str) -> None:
    """They would be dropped for one that is made already; so would a misspelled name."""
    given: dict[str, Any] = LOADED | {"backend": TorchBackend(), "deterministic": True}
    shared = LLM(target).shared
    for made in (target, shared) if name in LOADED else (shared,):
        with refused(name):
            LLM(made, **{name: given[name]})


def test_a_head_for_a_deeper_target(target: Target) -> None:
    head = make_drafter(make_target(layers=6), "eagle3")
    with refused("feature_layers"):
        LLM(target).use(head)
