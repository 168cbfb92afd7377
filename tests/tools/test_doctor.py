"""Healthy heads of every kind pass; each kind of damage is named, first and by its check."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_drafter, make_target
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.kv_cache import KVCache
from peagle.backends.own_code import OwnCodeDrafter, OwnCodeTarget
from peagle.backends.torch import TorchBackend
from peagle.engine.request import Stats
from peagle.errors import InputError
from peagle.heads.checks import CHECKS
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS
from peagle.model.config import Embedding, Provenance
from peagle.model.drafter import Drafter
from peagle.model.fingerprints import config_hash, template_hash, weights_hash
from peagle.model.target import ATTENTION, Target
from peagle.tools import doctor
from peagle.tools.doctor import Check, examine, verdict

KINDS: list[tuple[str, Embedding]] = [
    ("p-eagle", "mask-row"),
    ("p-eagle", "full"),
    ("p-eagle", "shared"),
    ("eagle3", "full"),
    ("eagle3", "shared"),
]
MASK, TABLE = 3, "embed_tokens.weight"
NESTED = f"eagle_config__{LAYER_IDS}"
KNOWN = "peagle__provenance__"
Damage = Callable[[Path], object]
Tensors = dict[str, Tensor]


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
    skipped = ["mask token", "mask values"] * (method == "eagle3")
    assert [check.name for check in checks if check.state == "skipped"] == skipped
    warned = [check.name for check in checks if check.state == "warning"]
    assert set(warned) <= {"acceptance"}, "these heads are not trained"
    passed = len(checks) - len(skipped) - len(warned)
    assert verdict(checks).startswith(f"nothing differs in {passed} checks")
    [logits] = [check for check in checks if check.name == "logits"]
    assert "5 of 5 argmaxes agree" in logits.found
    assert target.model.config._attn_implementation == ATTENTION, "left as it was"


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_healthy_flags_pass(target: Target, method: str, flag: str, tmp_path: Path) -> None:
    head = make_head(target, method, "shared", **{flag: True})
    save_drafter(head, tmp_path / "head")
    assert wrong(examine(tmp_path / "head", target)) == []


@pytest.mark.parametrize("dialect", ["native", "vllm", "speculators"])
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_tap_after_the_last_layer(
    target: Target, method: str, dialect: Any, tmp_path: Path
) -> None:
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


def change(**keys: Any) -> Damage:
    """Set keys of config.json; a.b is written a__b, None removes."""

    def damage(head: Path) -> None:
        raw = json.loads((head / "config.json").read_text())
        for name, value in keys.items():
            *path, last = name.split("__")
            inner = raw
            for part in path:
                inner = inner[part]
            inner[last] = value
            if value is None:
                del inner[last]
        (head / "config.json").write_text(json.dumps(raw))

    return damage


def layers(ids: list[int]) -> Damage:
    return change(**{LAYER_IDS: ids, NESTED: ids})


def forgotten(top: list[Any] | None, nested: list[Any] | None) -> Damage:
    """Layer ids of a head that does not record with which it was trained."""
    return change(**{LAYER_IDS: top, NESTED: nested, KNOWN + "feature_layers": []})


def tensors(edit: Callable[[Tensors], object]) -> Damage:
    def damage(head: Path) -> None:
        found = load_file(head / "model.safetensors")
        edit(found)
        save_file(found, head / "model.safetensors")

    return damage


def put(name: str, value: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(lambda found: found.update({name: value(found[name]).contiguous()}))


def drop(name: str) -> Damage:
    return tensors(lambda found: found.pop(name))


def target_row(token: int) -> Tensor:
    return make_target(layers=7).embedding[token].bfloat16()


def with_mask_row(table: Tensor) -> Tensor:
    table[MASK] = target_row(MASK)
    return table


def truncated(head: Path) -> None:
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def two_layers(head: Path) -> None:
    """In all but the list whose length vLLM counts."""
    forgotten([2, 6], None)(head)
    put("fc.weight", lambda weight: weight[:, :64])(head)


ROW, HIDDEN = "mask_embedding", "mask_hidden"
DAMAGES: list[tuple[str, str, Damage]] = [
    ("files", "corrupt safetensors", truncated),
    ("files", "no .safetensors file", lambda head: (head / "model.safetensors").unlink()),
    ("files", "no JSON object", lambda head: (head / "config.json").write_text("[1")),
    ("sizes", "malformed", change(vocab_size=None)),
    ("sizes", "vocab_size is 100, the target's is 128", change(vocab_size=100)),
    ("sizes", "target_hidden_size is 48", change(target_hidden_size=48)),
    ("tensors", "mismatch for d2t", change(draft_vocab_size=90)),
    ("sizes", "draft_vocab_size is -1", change(draft_vocab_size=-1)),
    ("provenance", "trained for tiny-0: config hash 0", change(**{KNOWN + "config_hash": "0"})),
    ("provenance", "weights hash 0", change(**{KNOWN + "weights_hash": "0"})),
    ("chat template", "trained with chat template 0", change(**{KNOWN + "template_hash": "0"})),
    ("feature layers", "[0, 2, 5]; the head was trained with [0, 2, 6]", layers([0, 2, 5])),
    ("feature layers", "[0, 2]; the head was trained with", layers([0, 2])),
    ("feature layers", "[0, 3, 6]; the head was trained with", change(**{LAYER_IDS: [0, 3, 6]})),
    ("feature layers", "in eagle_config [0, 2, 5]", change(**{NESTED: [0, 2, 5]})),
    ("feature layers", "in eagle_config only: vLLM would tap", change(**{LAYER_IDS: None})),
    ("feature layers", "vLLM would count 3", two_layers),
    ("feature layers", "not strictly ascending", forgotten([2, 0, 6], [2, 0, 6])),
    ("feature layers", "the target has layers 0 to 6", forgotten([0, 2, 8], [0, 2, 8])),
    ("feature layers", "fc reads 96 features, [0, 2] are 2 layers", forgotten([0, 2], [0, 2])),
    ("feature layers", "malformed", forgotten(["0", 2, 6], ["0", 2, 6])),
    ("mask token", "outside the vocabulary", change(ptd_token_id=128)),
    ("mask token", "is an ordinary token", change(ptd_token_id=40)),
    ("mask token", "pad, bos, eos", change(ptd_token_id=0)),
    ("mask token", "chat template", change(ptd_token_id=2)),
    ("mask token", "mask_token_id 4, ptd_token_id 3 differ", change(mask_token_id=4)),
    ("mask token", "names no mask token", change(ptd_token_id=None)),
    ("tensors", "mask_hidden", drop(HIDDEN)),
    ("mask values", "mask_hidden is all zeros", put(HIDDEN, torch.zeros_like)),
    ("tensors", "mask_embedding", drop(ROW)),
    ("mask values", "row holds NaN", put(ROW, lambda row: row * float("nan"))),
    ("mask values", "row of token 9: never trained", put(ROW, lambda _: target_row(9))),
    ("tensors", "mask_embedding", change(peagle__embedding="shared")),
    ("tensors", "embed_tokens", change(peagle__embedding="full")),
    ("draft vocabulary", "not ascending at draft ids [5",
     put("d2t", lambda d: d - (torch.arange(96) == 5).long())),
    ("draft vocabulary", "leads to target ids", put("d2t", lambda d: d + 1)),
    ("tensors", "mismatch for d2t", put("d2t", lambda d: d[:95])),
    ("tensors", "d2t", drop("d2t")),
    ("draft vocabulary", "t2d marks 95 tokens",
     put("t2d", lambda t: t & (torch.arange(128) != 50))),
    ("tensors", "\"norm.weight\"", drop("norm.weight")),
    ("tensors", "layers.1.mlp.up_proj.weight",
     put("layers.1.mlp.up_proj.weight", lambda w: w[1:])),
    ("tensors", "\"extra\"", tensors(lambda t: t.update(extra=torch.zeros(1)))),
    ("keys", "final_logit_softcapping 30.0: it changes what", change(final_logit_softcapping=30.0)),
    ("keys", "attn_sinks 'on'", change(eagle_config__attn_sinks="on")),
    ("keys", "use_sliding_window is true", change(use_sliding_window=True)),
    ("keys", "use_aux_hidden_state is false", change(eagle_config__use_aux_hidden_state=False)),
    ("tensors", "\"input_norm.weight\"",
     change(norm_before_fc=True, eagle_config__norm_before_fc=True)),
    ("loading", "'fc.weight' holds NaN", put("fc.weight", lambda w: w / 0)),
    ("tensors", "heads have llama or qwen3 layers", change(model_type="gemma")),
]  # fmt: skip
TABLES: list[tuple[str, str, Damage]] = [
    ("mask values", "row of token 3: never trained", put(TABLE, with_mask_row)),
    ("embedding", "unrelated to the target's", put(TABLE, torch.randn_like)),
    ("embedding", "unrelated to the target's", put(TABLE, lambda table: table.roll(1, 0))),
    ("tensors", "mismatch for embed_tokens", put(TABLE, lambda table: table[:-1])),
    ("tensors", "mask_embedding",
     change(peagle__embedding="mask-row")),
]  # fmt: skip


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


def test_another_target_is_named_and_forced(target: Target, tmp_path: Path) -> None:
    save_drafter(make_head(target, "p-eagle", "mask-row"), tmp_path / "head")
    other = make_target(layers=7, seed=5)
    other.tokenizer.chat_template += " "
    checks = examine(tmp_path / "head", other)
    assert wrong(checks) == ["provenance", "chat template"]
    assert "--init-from" in verdict(checks)
    checks = examine(tmp_path / "head", other, force=True)
    assert wrong(checks) == []
    assert [check.name for check in checks if check.state == "forced"] == wrong(
        examine(tmp_path / "head", other)
    )


def test_acceptance_near_zero_is_a_warning(target: Target, tmp_path: Path) -> None:
    """A head of random weights: nothing differs, and nothing is accepted."""
    save_drafter(make_head(target, "p-eagle", "mask-row"), tmp_path / "head")
    checks = examine(tmp_path / "head", target)
    [found] = [check for check in checks if check.name == "acceptance"]
    assert found.state == "warning" and "almost nothing is accepted" in found.found
    assert re.match(r"acceptance length 1\.0\d at K = 5, \d+ rounds", found.found)
    assert wrong(checks) == [], "it is no reason to refuse it"
    assert "; warning: acceptance: acceptance length 1.0" in verdict(checks)
    assert "Likely causes: layers, chat template or target" in verdict(checks)


def test_what_is_accepted_is_told(target: Target, tmp_path: Path) -> None:
    """At the limit there is no warning."""
    save_drafter(make_head(target, "p-eagle", "mask-row"), tmp_path / "head")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stats, "acceptance_length", 1.1)
        checks = examine(tmp_path / "head", target)
    [found] = [check for check in checks if check.name == "acceptance"]
    assert found.state == "ok" and found.found.startswith("acceptance length 1.10 at K = 5")


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_features_of_another_layer_are_named(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(layers=8)
    save_drafter(make_head(target, method, "shared"), tmp_path / "head")
    forward = OwnCodeTarget.forward

    def early(model: OwnCodeTarget, batch: Batch, cache: KVCache, taps: Sequence[int]) -> object:
        return forward(model, batch, cache, [max(0, layer - 1) for layer in taps])

    monkeypatch.setattr(doctor, "choose_backend", lambda *_: TorchBackend())
    monkeypatch.setattr(OwnCodeTarget, "forward", early)
    assert_named(tmp_path / "head", target, "features", "not hidden_states[")


def draft_at(places: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine's drafter run at other positions."""
    forward = OwnCodeDrafter.forward

    def astray(model: OwnCodeDrafter, batch: Batch, *others: Any) -> object:
        return forward(model, replace(batch, positions=places(batch.positions)), *others)

    monkeypatch.setattr(doctor, "choose_backend", lambda *_: TorchBackend())
    monkeypatch.setattr(OwnCodeDrafter, "forward", astray)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_drafting_unlike_training_is_named(
    target: Target, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(make_head(target, method, "shared"), tmp_path / "head")
    draft_at(lambda right: right * 2, monkeypatch)
    assert_named(tmp_path / "head", target, "logits", "part at depth 0")


def test_a_late_depth_that_differs_is_named(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placeholders that stand one position too far: depth 0 is right."""
    save_drafter(make_head(target, "p-eagle", "mask-row"), tmp_path / "head")
    draft_at(lambda right: torch.cat([right[:-4], right[-4:] + 1]), monkeypatch)
    assert_named(tmp_path / "head", target, "logits", "part at depth 1")


@pytest.mark.parametrize(("prompt", "said"), [("the cat " * 300, "give a text of 4 to 128")])
def test_prompts_that_do_not_fit(target: Target, prompt: str, said: str, tmp_path: Path) -> None:
    save_drafter(make_head(target, "p-eagle", "mask-row"), tmp_path / "head")
    with pytest.raises(InputError, match=said):
        examine(tmp_path / "head", target, prompt=prompt)


def test_a_folder_without_config_is_no_head(target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no config.json"):
        examine(tmp_path, target)
