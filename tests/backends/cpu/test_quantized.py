"""int8 and int4 weights: how near they are, what stays as it is, and what is told."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from refusals import refused
from torch import Tensor, nn
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))
from families import FAMILIES, PLAIN, build, random_ids

from peagle.backends.cpu.matrix import GROUP, CpuLinear
from peagle.backends.cpu.quantized import KINDS, check_quantize, quantize
from peagle.errors import InputWarning
from peagle.model.attention import CausalAttend
from peagle.model.fingerprints import weights_hash
from peagle.model.target import Target

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # rounding
WIDE = PLAIN | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}


def linear(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False).to(dtype).requires_grad_(False)


def steps(plain: Tensor, kind: str) -> Tensor:
    """Distance between neighbouring values of each weight's scale."""
    if kind == "int8":
        return (plain.abs().amax(1, keepdim=True) / 127).expand_as(plain)
    low, high = plain.unflatten(1, (-1, GROUP)).aminmax(dim=-1)
    return ((high - low) / 15).repeat_interleave(GROUP, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_at_most_half_a_step_away(kind: str, dtype: torch.dtype) -> None:
    plain = linear(192, 576, dtype)
    made, weight = CpuLinear.of(plain, kind), plain.weight.float()
    # Scales are rounded to the dtype: the outermost values move by as much, many steps out.
    slack = 8 if kind == "int4" else 127
    bound = steps(weight, kind) * (0.5 + 2 * slack * DTYPES[dtype])
    bound += weight.abs() * DTYPES[dtype]
    assert ((made.weight.float() - weight).abs() <= bound).all()


def test_values_on_a_grid_of_sixteen_are_kept() -> None:
    """Models distributed in 4 bits have such values."""
    q = torch.randint(0, 16, (64, 2 * GROUP)).float()
    q[:, ::GROUP] = 0
    q[:, 1::GROUP] = 15
    layer = linear(64, 2 * GROUP, torch.bfloat16)
    layer.weight.copy_(q * 0.25 - 2)
    assert torch.equal(CpuLinear.of(layer, "int4").weight, layer.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_all_the_same(kind: str) -> None:
    layer = linear(64, 64, torch.bfloat16)
    layer.weight[:] = 0
    layer.weight[1] = -0.5
    assert torch.equal(CpuLinear.of(layer, kind).weight, layer.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_and_fingerprint_stay(kind: str) -> None:
    """The output head becomes int8."""
    config = LlamaConfig(**WIDE | {"vocab_size": 128, "tie_word_embeddings": True})
    target = Target(build(config).bfloat16(), None, "tiny")
    table = target.embedding.clone()
    hidden, fingerprint = torch.randn(3, 64).bfloat16(), weights_hash(target)
    before = target.logits(hidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(target, kind)
    assert sum(isinstance(m, CpuLinear) for m in target.model.modules()) == 4 * 7 + 1
    assert torch.equal(target.embedding, table) and weights_hash(target) == fingerprint
    found = target.logits(hidden)
    assert not torch.equal(found, before), "the head that logits are taken with"
    assert (found - before).norm() < 0.02 * before.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_shares_the_quantised_weights(kind: str) -> None:
    made = Target(build(LlamaConfig(**WIDE)), None, "tiny")
    quantize(made, kind)
    one = made.layers[0].mlp.up_proj
    other = made.copy().layers[0].mlp.up_proj
    assert other is not one
    assert other.matrix.data == one.matrix.data and other.matrix.scales == one.matrix.scales


def test_what_stays_is_named() -> None:
    target = Target(build(LlamaConfig(**WIDE | {"intermediate_size": 80})), None, "tiny")
    with pytest.warns(InputWarning, match=r"int4.*float32: mlp.down_proj") as told:
        quantize(target, "int4")
    assert "gate_proj" not in str(told[0].message) and "[64, 80]" in str(told[0].message)


def test_experts_in_one_tensor_are_named() -> None:
    target = Target(build(FAMILIES["qwen3_moe"]()), None, "moe")
    with pytest.warns(InputWarning, match="int8.*mlp.experts.gate_up_proj"):
        quantize(target, "int8")


@pytest.mark.parametrize(
    ("dtype", "fix"), [(torch.float32, "leave it out"), (torch.float16, "choose `dtype` bfloat16")]
)
def test_nothing_to_quantize(dtype: torch.dtype, fix: str) -> None:
    """By its shapes, or its dtype."""
    sizes = {"hidden_size": 48, "intermediate_size": 80}
    target = Target(build(LlamaConfig(**PLAIN | sizes)).to(dtype), None, "odd")
    with refused("quantize") as error:
        quantize(target, "int4")
    assert error.value.fix == fix


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4"])
def test_families_run_quantized(family: str) -> None:
    target = Target(build(FAMILIES[family]()), None, family)
    ids, positions = random_ids(9), torch.arange(9)
    plain = target.logits(target.forward(ids, positions, CausalAttend()).hidden)
    quantize(target, "int8")
    found = target.logits(target.forward(ids, positions, CausalAttend()).hidden)
    assert not torch.equal(found, plain)
    assert (found - plain).norm() / plain.norm() < 0.1


@pytest.mark.parametrize(("kind", "device"), [("int3", "cpu"), ("int4", "cuda")])
def test_bad_choices(kind: str, device: str) -> None:
    with refused("quantize"):
        check_quantize(kind, device)
