"""Heads stored as int8 rows with scales: what is read, what is refused, and how small they are."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from test_correction_files import make
from test_format import facts, raw_config, same_tensors
from tiny_heads import head_config, tiny_target
from torch import Tensor

from peagle.heads.format import FETCH_AGAIN
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.methods.base import Dialect
from peagle.model.config import Embedding
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PACK = Path(__file__).parents[2] / "heads" / "pack.py"
SHARD = "model.safetensors"


@pytest.fixture
def head(target: Target, tmp_path: Path) -> Path:
    save_drafter(make(target), tmp_path / "head", dtype=torch.int8)
    return tmp_path / "head"


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def half_a_step(name: str, read: dict[str, Tensor], wanted: Tensor) -> None:
    """A matrix as near as its rows' scales allow; the others in bf16."""
    if wanted.ndim != 2:
        assert torch.equal(read[name].float(), wanted.bfloat16().float()), name
        return
    step = (wanted.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    assert ((read[name] - wanted).abs() <= step / 2 * (1 + 1e-6)).all(), name


@pytest.mark.parametrize("embedding", ["full", "mask-row", "shared"])
def test_weights_within_half_a_step(target: Target, embedding: Embedding, tmp_path: Path) -> None:
    drafter = make(target, embedding)
    save_drafter(drafter, tmp_path / "head", dtype=torch.int8)
    read = load_drafter(tmp_path / "head", target)
    assert facts(read.config) == facts(drafter.config)
    state = read.state_dict()
    assert torch.equal(state.pop("d2t"), drafter.d2t)
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        half_a_step(name, state, drafter.state_dict()[name])


def test_every_matrix_is_stored_as_bytes(head: Path) -> None:
    for file in (head / SHARD, head / "correction" / SHARD):
        stored = load_file(file)
        for name, tensor in stored.items():
            if tensor.ndim == 2:
                scale = stored[f"{name}_scale"]
                assert tensor.dtype == torch.int8 and scale.shape == tensor.shape[:1]
                assert tensor.amax(1).maximum(-tensor.amin(1)).eq(127).all()
            elif tensor.is_floating_point():
                assert tensor.dtype == torch.bfloat16, name
    assert {"fc.weight", "layers.2.mlp.down_proj.weight_scale"} <= load_file(head / SHARD).keys()
    configs = [json.loads((f / "config.json").read_text()) for f in (head, head / "correction")]
    assert [config["dtype"] for config in configs] == ["int8", "int8"]


def test_saving_what_was_read_changes_no_byte(target: Target, head: Path, tmp_path: Path) -> None:
    save_drafter(load_drafter(head, target), tmp_path / "again", dtype=torch.int8)
    assert files(tmp_path / "again") == files(head)


def test_a_row_of_zeros_stays(target: Target, tmp_path: Path) -> None:
    """As a correction's tokens are before they are trained."""
    drafter = make(target)
    assert drafter.correction is not None
    torch.nn.init.zeros_(drafter.correction.token.weight)
    save_drafter(drafter, tmp_path / "head", dtype=torch.int8)
    read = load_drafter(tmp_path / "head", target)
    assert read.correction is not None and not read.correction.token.weight.any()


def test_it_takes_half_the_bytes(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    drafter = Drafter(head_config(embedding="full", sizes=wide, target_hidden_size=256))
    sizes = []
    for dtype in (torch.bfloat16, torch.int8):
        save_drafter(drafter, tmp_path / "head", dtype=dtype)
        sizes.append(sum(map(len, files(tmp_path / "head").values())))
    assert sizes[1] < 0.53 * sizes[0]


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_exports_hold_weights(target: Target, head: Path, dialect: Dialect, tmp_path: Path) -> None:
    bf16 = tiny_target()
    bf16.dtype = torch.bfloat16
    drafter = load_drafter(head, bf16, force=True)
    save_drafter(drafter, tmp_path / "out", dialect, dtype=None)
    raw = raw_config(tmp_path / "out")
    assert raw.get("transformer_layer_config", raw)["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "out" / SHARD)
    assert not [name for name in stored if name.endswith("_scale")]
    assert {t.dtype for t in stored.values()} == {torch.bfloat16, torch.int64, torch.bool}
    wanted = {name: t for name, t in drafter.state_dict().items() if name in stored}
    same_tensors({name: stored[name] for name in wanted if name != "mask_hidden"}, {
        name: t for name, t in wanted.items() if name != "mask_hidden"
    })  # fmt: skip
    read = load_drafter(tmp_path / "out", target)
    assert read.correction is not None, "it belongs to the head that was written"


def test_rows_are_of_the_native_dialect(target: Target, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="native"):
        save_drafter(make(target), tmp_path / "head", "vllm", dtype=torch.int8)
    assert not (tmp_path / "head").exists()


def test_pack(target: Target, head: Path, tmp_path: Path) -> None:
    """A head in bf16 becomes what saving it in int8 makes; its correction stays with it."""
    save_drafter(make(target), tmp_path / "plain")
    (tmp_path / "head" / "README.md").write_text("card")
    line = [sys.executable, str(PACK), str(tmp_path / "plain"), str(head)]
    subprocess.run(line, check=True)
    packed, plain = load_drafter(head, target), load_drafter(tmp_path / "plain", target)
    assert facts(packed.config) == facts(plain.config)
    for name, tensor in packed.state_dict().items():
        if tensor.is_floating_point():
            half_a_step(name, {name: tensor}, plain.state_dict()[name])
    assert (head / "README.md").read_text() == "card"


Change = Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]  # rows and scales
DAMAGE: dict[str, tuple[Change, str]] = {
    "no scale": (lambda rows, _: (rows, None), "NAME is int8 [ROWS, 32], NAME_scale missing"),
    "no matrix": (lambda _, scale: (None, scale), "NAME is missing, NAME_scale bfloat16 [ROWS]"),
    "no int8": (lambda rows, scale: (rows.float(), scale), "NAME is float32 [ROWS, 32]"),
    "a vector": (lambda rows, scale: (rows[:, 0].clone(), scale), "NAME is int8 [ROWS]"),
    "too short": (lambda rows, scale: (rows, scale[:5].clone()), "bfloat16 [5]"),
    "a column": (lambda rows, scale: (rows, scale[:, None] + 0), "NAME_scale bfloat16 [ROWS, 1]"),
    "whole": (lambda rows, scale: (rows, scale.int()), "NAME_scale int32 [ROWS]"),
    "NaN": (lambda rows, scale: (rows, scale / 0 * 0), "NAME_scale bfloat16 [ROWS]"),
    "infinite": (lambda rows, scale: (rows, scale / 0), "NAME_scale bfloat16 [ROWS]"),
}


@pytest.mark.parametrize(
    ("where", "name", "rows"), [("", "lm_head.weight", 9), ("correction", "state.weight", 8)]
)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(  # noqa: PLR0913
    target: Target, head: Path, kind: str, where: str, name: str, rows: int
) -> None:
    damage, why = DAMAGE[kind]
    tensors = load_file(head / where / SHARD)
    scale = f"{name}_scale"
    tensors[name], tensors[scale] = damage(tensors[name], tensors[scale])
    kept = {each: tensor for each, tensor in tensors.items() if tensor is not None}
    save_file(kept, head / where / SHARD)
    with refused("head") as error:
        load_drafter(head, target)
    assert error.value.value == head / where and error.value.fix == FETCH_AGAIN
    assert why.replace("NAME", name).replace("ROWS", str(rows)) in error.value.why
