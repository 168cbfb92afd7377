"""Damaged or foreign heads: each a one-line InputError that names what is wrong."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from json_files import change_json
from refusals import refused as expected
from safetensors.torch import load_file, save_file
from tiny_heads import HIDDEN, head_config, make_head, provenance_of, tiny_target
from torch import Tensor

from peagle.heads.format import read_keys
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.model.target import Target


@pytest.fixture
def head(target: Target, tmp_path: Path) -> Path:
    config = head_config(provenance=provenance_of(target))
    save_drafter(make_head(config), tmp_path / "head")
    return tmp_path / "head"


def refused(head: str | Path, target: Target, match: str, *, force: bool = False) -> None:
    with expected("head") as error:
        load_drafter(head, target, force=force)
    assert re.search(match, str(error.value))


def change_tensors(head: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")


def test_folder_without_config(target: Target, head: Path) -> None:
    (head / "config.json").unlink()
    refused(head, target, "head .*: no config.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "config.json is no JSON object"),
        ("[1]", "config.json is no JSON object"),
        ('{"model_type": "mamba"}', "model_type 'mamba': unknown"),
        (
            '{"model_type": "llama", "eagle_aux_hidden_state_layer_ids": [1]}',
            "missing 'vocab_size'",
        ),
    ],
)
def test_unreadable_config(text: str, why: str, target: Target, head: Path) -> None:
    (head / "config.json").write_text(text)
    refused(head, target, why)


@pytest.mark.parametrize(
    "changes",
    [
        {"peagle": [1]},
        {"peagle": {"method": [1]}},
        {"peagle": {"depths": "x"}},
        {"peagle": {"provenance": {"x": 1}}},
        {"speculators_config": "x"},
    ],
    ids=str,
)
def test_keys_of_another_type(changes: dict[str, Any], head: Path) -> None:
    """Before the target is known, as commands read them."""
    change_json(head / "config.json", **changes)
    keys = read_keys(head)
    with expected("head"):
        _ = keys.method, keys.depths, keys.trained


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}, "strictly ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, "strictly ascending"),
        ({"hidden_size": "wide"}, "config.json: .*hidden_size"),
        ({"speculators_model_type": "medusa", "transformer_layer_config": {}}, "of medusa"),
        ({"norm_before_fc": True, "fc_norm": True, "eagle_config": {}}, "excludes `fc_norm`"),
        ({"final_logit_softcapping": 30.0}, "keys: .*: it changes what a head computes"),
    ],
    ids=str,
)
def test_contradictions(changes: dict[str, Any], why: str, target: Target, head: Path) -> None:
    change_json(head / "config.json", **changes)
    refused(head, target, why)


def test_default_layers_collide_below_seven(target: Target, head: Path) -> None:
    change_json(head / "config.json", eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    refused(head, target, r"feature_layers \[2, 2, 1\]: must be strictly ascending")


def test_what_a_check_finds_is_refused(target: Target, head: Path) -> None:
    """All checks are tested in tools/test_doctor.py."""
    change_tensors(head, lambda tensors: tensors.pop("mask_hidden"))
    refused(head, target, "head .* does not fit tiny-0: tensors: mask_hidden is missing; downl")


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_our_own_head_without_its_table(method: str, target: Target, tmp_path: Path) -> None:
    """Its config records a table: the target's would draft too, but worse, without a trace."""
    config = head_config(method, provenance=provenance_of(target))
    save_drafter(make_head(config), tmp_path / "own")
    change_tensors(tmp_path / "own", lambda tensors: tensors.pop("embed_tokens.weight"))
    refused(tmp_path / "own", target, "embed_tokens.weight is missing")


def pickled(file: Path) -> None:
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "is a corrupt safetensors file"),
        (lambda file: file.write_bytes(b""), "model.safetensors is a corrupt safetensors file"),
        (pickled, r"no \.safetensors file \(pickles are not loaded\)"),
    ],
)
def test_weights_that_cannot_be_read(
    damage: Callable[[Path], object], why: str, target: Target, head: Path
) -> None:
    damage(head / "model.safetensors")
    refused(head, target, why)


def test_head_for_another_target(head: Path) -> None:
    """Another architecture, other weights, another chat template: named in this order."""
    deeper = tiny_target(num_hidden_layers=5)
    refused(head, deeper, "trained for tiny-0: config hash .*`force`.*--init-from")
    refused(head, tiny_target(seed=1), "trained for tiny-0: weights hash .*`force`")
    refused(head, tiny_target(), "trained with chat template .*`chat_template`.*`force`")


def test_force_accepts_a_fine_tune(target: Target, head: Path) -> None:
    assert load_drafter(head, target).config.provenance == provenance_of(target), "without it"
    for other in (tiny_target(num_hidden_layers=5), tiny_target(seed=1), tiny_target()):
        assert load_drafter(head, other, force=True).config.provenance.target == "tiny-0"


def test_force_does_not_accept_another_size(head: Path) -> None:
    wide = tiny_target(hidden_size=HIDDEN + 8)
    why = "does not fit tiny-0: sizes: target_hidden_size is 32, the target's is 40; .*that one$"
    refused(head, wide, why, force=True)
    why = "vocab_size is 67, the target's is 70"
    refused(head, tiny_target(vocab_size=70), why, force=True)
