"""int8 and int4 weights: how near they are, which product they give, and what they leave alone.
Both ways to hold them are tested, as far as this CPU has them."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, PLAIN, build, random_ids
from tiny import make_drafter, make_target
from torch import nn
from transformers import LlamaConfig

from peagle.config import InputError, InputWarning
from peagle.model import native
from peagle.model.attend import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.quantized import (
    GROUP,
    KINDS,
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    TiledInts,
    _int4,
    _int8,
    quantize_layers,
)
from peagle.model.source import load_target
from peagle.model.target import Target

LAYERS = (Int8Linear, Int4Linear)
DTYPES = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # rounding
WIDE = PLAIN | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}


@pytest.fixture(params=(TiledInts, QuantizedLinear))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """What bf16 layers are replaced by."""
    if request.param is QuantizedLinear:
        monkeypatch.setattr(native, "tiles", lambda: False)
    elif not native.tiles():
        pytest.skip("this CPU has no tiles (AMX)")
    return request.param


def linear(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def steps(plain: torch.Tensor, kind: type[QuantizedLinear]) -> torch.Tensor:
    """Distance between neighbouring values of each weight's scale."""
    if kind is Int8Linear:
        return (plain.abs().amax(1, keepdim=True) / 127).expand_as(plain)
    low, high = plain.unflatten(1, (-1, GROUP)).aminmax(dim=-1)
    return ((high - low) / 15).repeat_interleave(GROUP, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_weights_are_at_most_half_a_step_away(kind, dtype: torch.dtype) -> None:
    plain = linear(192, 576, dtype)
    made, weight = kind(plain), plain.weight.float()
    # Scales are rounded to the dtype: the outermost values move by as much, many steps out.
    slack = 8 if kind is Int4Linear else 127
    bound = steps(weight, kind) * (0.5 + 2 * slack * DTYPES[dtype])
    bound += weight.abs() * DTYPES[dtype]
    assert ((made.weight.float() - weight).abs() <= bound).all()


def test_values_on_a_grid_of_sixteen_are_kept() -> None:
    """As a model that was distributed in 4 bits has them."""
    q = torch.randint(0, 16, (64, 2 * GROUP)).float()
    q[:, ::GROUP], q[:, 1::GROUP] = 0, 15
    layer = linear(64, 2 * GROUP, torch.bfloat16)
    layer.weight.copy_(q * 0.25 - 2)
    assert torch.equal(Int4Linear(layer).weight, layer.weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_products_for_few_and_many_rows_are_those_of_the_weights(
    kind, bias: bool, dtype: torch.dtype
) -> None:
    made = kind(linear(192, 96, dtype, bias=bias))
    added = made.bias.double() if bias else None
    for rows in (1, 5, made.many - 1, made.many, 3 * made.many):
        x = torch.randn(1, rows, 96, dtype=dtype)
        exact = F.linear(x.double(), made.weight.double(), added)
        # Few rows are multiplied with weights that are not rounded to the dtype once more.
        error = (made(x).double() - exact).norm() / exact.norm()
        assert made(x).shape == (1, rows, 192) and error < 2 * DTYPES[dtype], rows


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_do_not_depend_on_rows_beside_them(kind) -> None:
    made, x = kind(linear(192, 96, torch.bfloat16)), torch.randn(8, 96).bfloat16()
    together = made(x)
    for block in (1, 3, 5):
        parts = torch.cat([made(part) for part in x.split(block)])
        assert torch.equal(parts, together), block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (192, 96), (80, 64), (576, 1536)])
def test_tiles_hold_the_same_weights(kind: str, outputs: int, inputs: int) -> None:
    if not native.tiles():
        pytest.skip("this CPU has no tiles (AMX)")
    layer = linear(-(-outputs // 64) * 64, inputs, torch.bfloat16)  # torch takes whole 64
    by_torch = (Int8Linear if kind == "int8" else Int4Linear)(layer).weight[:outputs]
    layer.weight = nn.Parameter(layer.weight[:outputs], requires_grad=False)
    layer.out_features = outputs
    assert torch.equal(TiledInts(layer, kind).weight, by_torch)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (192, 96), (80, 64), (576, 1536)])
def test_tiles_multiply_by_weights_that_are_not_rounded(
    kind: str, outputs: int, inputs: int, bias: bool
) -> None:
    """But for float32 sums and one rounding to bf16; and every row as if it were alone."""
    if not native.tiles():
        pytest.skip("this CPU has no tiles (AMX)")
    layer = linear(outputs, inputs, torch.bfloat16, bias=bias)
    made, added = TiledInts(layer, kind), layer.bias.double() if bias else None
    if kind == "int8":
        q, scale = _int8(layer.weight)
        exact_weight = q.double() * scale.double()[:, None]
    else:
        q, scale, zero = (part.double() for part in _int4(layer.weight))
        scale, zero = (part.repeat_interleave(GROUP, dim=1) for part in (scale, zero))
        exact_weight = (q - 8) * scale + zero
    x = torch.randn(300, inputs).bfloat16()
    together = made(x)
    for rows in (1, 4, 16, 17, 40, 300):
        assert torch.equal(made(x[None, :rows])[0], together[:rows]), rows
    exact = F.linear(x.double(), exact_weight, added)
    bound = exact.abs() * DTYPES[torch.bfloat16] + 1e-5 * exact.norm(dim=1, keepdim=True)
    assert ((together.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", LAYERS)
def test_weights_that_are_all_the_same(kind) -> None:
    layer = linear(64, 64, torch.bfloat16)
    layer.weight[:] = 0
    layer.weight[1] = -0.5
    assert torch.equal(kind(layer).weight, layer.weight)


def test_a_layout_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a CPU still has the product; the weights are read through it."""
    layer = linear(64, 64, torch.float32)
    known = Int4Linear(layer).weight
    monkeypatch.setattr("peagle.model.quantized._unpacked", lambda packed, block: packed)
    unknown = Int4Linear(layer)
    torch.testing.assert_close(unknown.weight, known)
    x = torch.randn(100, 64)
    torch.testing.assert_close(unknown(x), x @ known.T)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_and_fingerprint_stay(kind: str, way: type[nn.Module]) -> None:
    """The output head goes the way of the layers where products of int8 never lose."""
    config = LlamaConfig(**WIDE | {"vocab_size": 128, "tie_word_embeddings": True})
    target = Target(build(config).bfloat16(), None, "tiny")
    table, head = target.embedding.clone(), target.model.lm_head
    hidden, fingerprint = torch.randn(3, 64).bfloat16(), target.weights_hash()
    before = target.logits(hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_layers(target, kind)
    tiled = way is TiledInts
    assert sum(isinstance(m, way) for m in target.model.modules()) == 4 * 7 + tiled
    assert torch.equal(target.embedding, table) and target.weights_hash() == fingerprint
    assert (target.model.lm_head is head) != tiled
    found = target.logits(hidden)
    assert torch.equal(found, before) != tiled, "the head that logits are taken with"
    assert (found - before).norm() < 0.02 * before.norm()


def test_what_stays_is_named() -> None:
    target = Target(build(LlamaConfig(**WIDE | {"intermediate_size": 96})), None, "tiny")
    with pytest.warns(InputWarning, match=r"int4.*float32: mlp.gate_proj.*mlp.up_proj") as said:
        quantize_layers(target, "int4")
    assert "down_proj" not in str(said[0].message) and "[96, 64]" in str(said[0].message)


def test_experts_in_one_tensor_are_named() -> None:
    target = Target(build(FAMILIES["qwen3_moe"]()), None, "moe")
    with pytest.warns(InputWarning, match="int8.*mlp.experts.gate_up_proj"):
        quantize_layers(target, "int8")


def test_nothing_to_quantize() -> None:
    target = Target(build(LlamaConfig(**PLAIN | {"hidden_size": 48})), None, "odd")
    with pytest.raises(InputError, match=r"int4.*no matrix of odd.*mlp.gate_proj"):
        quantize_layers(target, "int4")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4"])
def test_families_run_quantized(family: str) -> None:
    target = Target(build(FAMILIES[family]()), None, family)
    ids = random_ids(9)
    places = torch.arange(9)
    plain = target.logits(target.forward(ids, places, CausalAttend()).hidden)
    quantize_layers(target, "int8")
    found = target.logits(target.forward(ids, places, CausalAttend()).hidden)
    assert not torch.equal(found, plain)
    assert (found - plain).norm() / plain.norm() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_load_target_quantizes_and_a_head_fits(kind: str, tmp_path: Path) -> None:
    made = make_target()
    made.model.save_pretrained(tmp_path)
    assert made.tokenizer is not None
    made.tokenizer.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InputWarning)  # the tiny target has shapes without int4
        target = load_target(str(tmp_path), quantize=kind)
    assert any(isinstance(m, QuantizedLinear) for m in target.model.modules())
    assert target.weights_hash() == made.weights_hash()
    assert isinstance(make_drafter(target, "p-eagle"), Drafter)


@pytest.mark.parametrize(
    ("quantize", "device", "said"),
    [
        ("int3", "cpu", "quantize 'int3': choose int8 or int4"),
        ("int4", "auto", "only on the CPU, not on cuda; choose the device cpu"),
    ],
)
def test_bad_choices(
    quantize: str, device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match=said):
        load_target("nowhere", quantize=quantize, device=device)
