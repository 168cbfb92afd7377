"""Healthy heads of every kind pass; each kind of damage is named, first and by its check."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damages import DAMAGES, MASK, TABLES, Damage, change
from refusals import refused
from tiny import make_drafter, make_target
from tiny_heads import FLAGS, KINDS
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.kv_cache import KVCache
from peagle.backends.own_code import OwnCodeDrafter, OwnCodeTarget
from peagle.backends.torch import TorchBackend
from peagle.engine import shared
from peagle.engine.request import Stats
from peagle.heads.checks import CHECKS
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS
from peagle.model.config import Embedding, Provenance
from peagle.model.drafter import Drafter
from peagle.model.fingerprints import config_hash, template_hash, weights_hash
from peagle.model.target import ATTENTION, Target
from peagle.tools import doctor
from peagle.tools.doctor import Check, examine, verdict


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(layers=7)


def make_head(target: Target, method: str, embedding: Embedding, **flags: bool) -> Drafter:
    """As training leaves it: a table near the target's, a mask row of its own, provenance."""
    random = make_drafter(target, method, **flags)
    hashes = (config_hash(target), weights_hash(target), template_hash(target))
    known = Provenance(target.name, *hashes, list(random.config.feature_layers), {"steps": 3})
    head = Drafter(replace(random.config, embedding=embedding, depths=5, provenance=known))
    head.load_state_dict(random.state_dict(), strict=False)
    if embedding == "full":
        moved = target.embedding + torch.randn_like(target.embedding) * 0.01
        moved[MASK] = torch.randn(moved.shape[1])
        head.embed_tokens.weight.data.copy_(moved)
    head.share_embedding(target.embedding)
    return head


def wrong(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.state == "wrong"]


@pytest.mark.parametrize("dialect", ["native", "vllm", "speculators"])
@pytest.mark.parametrize(("method", "embedding"), KINDS)
def test_healthy_heads_pass(
    target: Target, method: str, embedding: Embedding, dialect: Any, tmp_path: Path
) -> None:
    save_drafter(make_head(target, method, embedding), tmp_path / "head", dialect)
    checks = examine(tmp_path / "head", target)
    assert wrong(checks) == []
    skipped = ["mask token"] * (method == "eagle3")
    assert [check.name for check in checks if check.state == "skipped"] == skipped
    warned = [check.name for check in checks if check.state == "warning"]
    assert set(warned) <= {"acceptance"}, "these heads are not trained"
    passed = len(checks) - len(skipped) - len(warned)
    assert verdict(checks).startswith(f"nothing differs in {passed} checks")
    [logits] = [check for check in checks if check.name == "logits"]
    assert "5 of 5 argmaxes agree" in logits.found
    assert target.model.config._attn_implementation == ATTENTION, "left as it was"


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_healthy_flags_pass(target: Target, method: str, flag: str, tmp_path: Path) -> None:
    head = make_head(target, method, "shared", **{flag: True})
    save_drafter(head, tmp_path / "head")
    assert wrong(examine(tmp_path / "head", target)) == []


@pytest.mark.parametrize("dialect", ["native", "vllm", "speculators"])
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_tap_behind_all_layers(target: Target, method: str, dialect: Any, tmp_path: Path) -> None:
    """Features are what leaves the layer, before the final norm; trainer and engine agree."""
    head = make_head(target, method, "shared")
    layers = [0, 3, len(target.layers)]
    known = replace(head.config.provenance, feature_layers=layers)
    head.config = replace(head.config, feature_layers=tuple(layers), provenance=known)
    save_drafter(head, tmp_path / "head", dialect)
    checks = examine(tmp_path / "head", target)
    assert wrong(checks) == []
    assert {"features", "logits"} <= {check.name for check in checks if check.state == "ok"}


def test_bfloat16_passes(tmp_path: Path) -> None:
    plain = make_target(layers=7)
    target = Target(plain.model.bfloat16(), plain.tokenizer, plain.name)
    save_drafter(make_head(target, "p-eagle", "mask-row"), tmp_path / "head")
    assert wrong(examine(tmp_path / "head", target)) == []


def test_foreign_heads_pass_and_say_what_is_not_known(target: Target, tmp_path: Path) -> None:
    save_drafter(make_head(target, "p-eagle", "full"), tmp_path / "head", "vllm")
    change(peagle=None, **{LAYER_IDS: [0, 2, 6]})(tmp_path / "head")
    checks = examine(tmp_path / "head", target)
    assert wrong(checks) == []
    states = {check.name: check.state for check in checks}
    assert states["provenance"] == states["chat template"] == "skipped"


def assert_named(head: Path, target: Target, name: str, said: str) -> None:
    checks = examine(head, target)
    first = next(check for check in checks if check.state == "wrong")
    assert first.name == name and said in first.found, checks
    assert verdict(checks) == f"{name}: {first.found}. Fix: {first.fix}"
    assert first.fix
    assert [check.name for check in checks][1 : 1 + len(CHECKS)] == list(CHECKS)
    assert len(checks) == len(CHECKS) + 5, "what cannot be checked is said to be skipped"


@pytest.fixture(scope="module")
def healthy(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[Embedding, Path]:
    """Heads to damage copies of."""
    folders: dict[Embedding, Path] = {}
    for embedding in ("mask-row", "full"):
        folders[embedding] = tmp_path_factory.mktemp(embedding) / "head"
        save_drafter(make_head(target, "p-eagle", embedding), folders[embedding])
    return folders


OF_KINDS = [("mask-row", *row) for row in DAMAGES] + [("full", *row) for row in TABLES]


@pytest.mark.parametrize(
    ("embedding", "name", "said", "damage"), OF_KINDS, ids=[row[2] for row in OF_KINDS]
)
def test_damage_is_named(  # noqa: PLR0913, PLR0917
    target: Target, healthy: dict[Embedding, Path], tmp_path: Path, embedding: Embedding,
    name: str, said: str, damage: Damage,
) -> None:  # fmt: skip
    head = shutil.copytree(healthy[embedding], tmp_path / "head")
    damage(head)
    assert_named(head, target, name, said)


def test_another_target_is_named_and_forced(healthy: dict[Embedding, Path]) -> None:
    other = make_target(layers=7, seed=5)
    other.tokenizer.chat_template += " "
    checks = examine(healthy["mask-row"], other)
    assert wrong(checks) == ["provenance", "chat template"]
    assert "--init-from" in verdict(checks)
    forced = examine(healthy["mask-row"], other, force=True)
    assert wrong(forced) == []
    assert [check.name for check in forced if check.state == "forced"] == wrong(checks)


@pytest.mark.parametrize("template", [True, False])
def test_acceptance_near_zero_is_a_warning(healthy: dict[Embedding, Path], template: bool) -> None:
    """A head of random weights: nothing differs, and nothing is accepted."""
    target = make_target(layers=7)
    if not template:
        target.tokenizer.chat_template = None
    checks = examine(healthy["mask-row"], target, force=True)
    [found] = [check for check in checks if check.name == "acceptance"]
    assert found.state == "warning" and found.fix
    assert re.match(r"acceptance length 1\.0\d at K = 5, \d+ rounds", found.found)
    assert wrong(checks) == [], "it is no reason to refuse it"
    assert found.found in verdict(checks) and found.fix in verdict(checks)


def test_what_is_accepted_is_told(
    target: Target, healthy: dict[Embedding, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit there is no warning."""
    monkeypatch.setattr(Stats, "acceptance_length", 1.1)
    [found] = [each for each in examine(healthy["mask-row"], target) if each.name == "acceptance"]
    assert found.state == "ok" and found.found.startswith("acceptance length 1.10 at K = 5")


def moved(model: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Have the torch backend's target or drafter run with another batch or other layers."""
    forward = model.forward
    for place in (doctor, shared):
        monkeypatch.setattr(place, "choose_backend", lambda *_, **__: TorchBackend())
    monkeypatch.setattr(model, "forward", lambda self, *given: forward(self, *change(*given)))


def one_layer_early(batch: Batch, cache: KVCache, layers: Sequence[int]) -> tuple[Any, ...]:
    return batch, cache, [max(0, layer - 1) for layer in layers]


def at_positions(change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Any, ...]]:
    def changed(batch: Batch, *others: Any) -> tuple[Any, ...]:
        return replace(batch, positions=change(batch.positions)), *others

    return changed


@pytest.mark.parametrize(
    ("method", "model", "change", "name", "said"),
    [
        ("p-eagle", OwnCodeTarget, one_layer_early, "features", "not hidden_states["),
        ("eagle3", OwnCodeTarget, one_layer_early, "features", "not hidden_states["),
        ("p-eagle", OwnCodeDrafter, at_positions(lambda p: p * 2), "logits", "part at depth 0"),
        ("eagle3", OwnCodeDrafter, at_positions(lambda p: p * 2), "logits", "part at depth 0"),
        (  # masked slots one position too far: depth 0 is right
            "p-eagle",
            OwnCodeDrafter,
            at_positions(lambda p: torch.cat([p[:-4], p[-4:] + 1])),
            "logits",
            "part at depth 1",
        ),
    ],
)
def test_an_engine_unlike_training_is_named(  # noqa: PLR0913, PLR0917
    method: str, model: Any, change: Callable[..., Any], name: str, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target = make_target(layers=8)
    save_drafter(make_head(target, method, "shared"), tmp_path / "head")
    moved(model, monkeypatch, change)
    assert_named(tmp_path / "head", target, name, said)


def test_a_target_that_computes_no_numbers_is_named(tmp_path: Path) -> None:
    target = make_target(layers=7)
    with torch.no_grad():
        target.model.lm_head.weight.fill_(float("nan"))
    save_drafter(make_head(target, "p-eagle", "mask-row"), tmp_path / "head")
    assert_named(tmp_path / "head", target, "logits", "the target's logits are NaN or infinite")


def test_a_folder_without_config_is_no_head(target: Target, tmp_path: Path) -> None:
    with refused("head"):
        examine(tmp_path, target)
