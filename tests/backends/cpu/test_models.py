"""Whole models by native code are those of the reference backend."""

import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from families import FAMILIES, LEFT, MIXED, PLAIN, WINDOW, build  # noqa: E402
from json_files import change_json  # noqa: E402
from tiny_heads import head_config  # noqa: E402

from peagle.backends.base import TargetModel
from peagle.backends.batch import Batch, Span
from peagle.backends.cpu.backend import CpuBackend
from peagle.backends.cpu.decoder import RotaryTable
from peagle.backends.cpu.drafter import GenericDrafter, NativeDrafter
from peagle.backends.cpu.matrix import CpuLinear
from peagle.backends.cpu.packed import keep_packed
from peagle.backends.cpu.quantized import quantize
from peagle.backends.cpu.target import NativeTarget
from peagle.backends.kv_cache import KVCache
from peagle.backends.own_code import OwnCodeTarget
from peagle.backends.torch import TorchBackend
from peagle.model.describe import describe_target
from peagle.model.described import DescribedTarget
from peagle.model.drafter import Drafter
from peagle.model.layer_config import Rope
from peagle.model.loader import described_target, load_target
from peagle.model.partial import load_partial
from peagle.model.target import Target

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA = PLAIN | {
    "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
    "layer_types": list(MIXED), "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**PLAIN),
    "biases": lambda: LlamaConfig(**PLAIN, attention_bias=True, mlp_bias=True),
    "qwen3": lambda: Qwen3Config(**PLAIN, head_dim=12),
    "wide": lambda: Qwen3Config(**PLAIN | {"hidden_size": 96}, head_dim=32, attention_bias=True),
    "llama3": lambda: LlamaConfig(**PLAIN, rope_parameters=LLAMA3),
    "linear": lambda: LlamaConfig(**PLAIN, rope_parameters=LINEAR),
    "qwen2": lambda: Qwen2Config(**PLAIN),
    "mistral": lambda: MistralConfig(**PLAIN, sliding_window=21),
    "windows": lambda: Qwen2Config(
        **PLAIN, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA),
    "capped": lambda: Gemma3TextConfig(**GEMMA, final_logit_softcapping=3.0, attention_bias=True),
}
# Rounds of forwards over two requests: prompts in chunks, then drafts. (start, rows) of each.
ROUNDS = [[(0, 5), (0, 1)], [(5, 1), (1, 32)], [(6, 8), (33, 2)], [(14, 70), (35, 1)]]
BLOCKS = [[9, 3, 4, 7, 11, 2], [1, 0, 5]]


def backend(*, exact: bool = False) -> CpuBackend:
    return CpuBackend(describe_target, keep_packed, exact=exact)


def rounds() -> Iterator[Batch]:
    for number, parts in enumerate(ROUNDS):
        spans = []
        for blocks, (start, count) in zip(BLOCKS, parts, strict=True):
            spans.append(Span(blocks, start, [(3 * i + number) % 60 for i in range(count)]))
        yield Batch.of(spans)


def run(model: TargetModel, target: Target) -> list[Tensor]:
    """Hidden states, features and logits of every round, and what is kept at the end."""
    cache = KVCache(16, target.kv_shapes, target.dtype, target.device)
    found = list[Tensor]()
    for batch in rounds():
        out = model.forward(batch, cache, LEFT)
        found += [out.hidden.clone(), out.features.clone(), model.logits(out.hidden).clone()]
    return found + [part for pair in cache.layers for part in pair]


def close(found: list[Tensor], wanted: list[Tensor], bound: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        difference = (one.double() - other.double()).norm()
        assert difference <= bound * (other.double().norm() + 1e-6)


BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 6e-2}  # of the norm


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_native_target(name: str, dtype: torch.dtype, exact: bool) -> None:
    target = Target(build(CONFIGS[name]()).to(dtype), None, name)
    model = backend(exact=exact).target(target)
    assert isinstance(model, NativeTarget)
    before = [parameter.clone() for parameter in target.model.parameters()]
    close(run(model, target), run(TorchBackend().target(target), target), BOUNDS[dtype])
    assert all(map(torch.equal, before, target.model.parameters())), "weights stay"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """Those with biases, windows, caps, sinks and experts, most of them by their own code."""
    target = Target(build(FAMILIES[family]()), None, family)
    model = backend().target(target)
    assert isinstance(model, NativeTarget if family in ("llama", "qwen3") else OwnCodeTarget)
    close(run(model, target), run(TorchBackend().target(target), target), 1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_families_in_bf16(family: str) -> None:
    target = Target(build(FAMILIES[family]()).bfloat16(), None, family)
    model = backend(exact=True).target(target)
    close(run(model, target)[:1], run(TorchBackend().target(target), target)[:1], 0.1)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_rows_do_not_depend_on_rows_beside_them(family: str, dtype: torch.dtype) -> None:
    configs = FAMILIES if family == "qwen3_moe" else CONFIGS
    target = Target(build(configs[family]()).to(dtype), None, family)
    model: TargetModel = backend(exact=True).target(target)
    cache = KVCache(16, target.kv_shapes, target.dtype, target.device)
    whole = model.forward(Batch.of([Span(BLOCKS[0], 0, list(range(3, 43)))]), cache, LEFT)
    hidden, features = whole.hidden.clone(), whole.features.clone()
    for start, count in ((0, 1), (1, 13), (14, 26)):
        span = Span(BLOCKS[0], start, list(range(3 + start, 3 + start + count)))
        out = model.forward(Batch.of([span]), cache, LEFT)
        assert torch.equal(out.hidden, hidden[start : start + count])
        assert torch.equal(out.features, features[start : start + count])


@pytest.mark.parametrize("size", ["10GB", "40KB"])
def test_a_head_in_the_files_is_not_tied_whatever_the_config_says(
    size: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """As in transformers, which ties equal ones only."""
    build(LlamaConfig(**PLAIN)).save_pretrained(tmp_path, max_shard_size=size)
    tokenizer.save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    loaded, read = load_target(str(tmp_path)), described_target(str(tmp_path))
    described, part = describe_target(loaded), load_partial(str(tmp_path))
    assert read is not None and described is not None
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    wanted = loaded.logits(hidden)
    assert not torch.allclose(wanted, hidden @ loaded.embedding.T, atol=1e-2)
    assert torch.equal(part.logits(hidden), wanted)
    for target in (read, described):
        close(backend().target(target).logits(hidden), wanted, 1e-4)


@pytest.mark.parametrize("name", ["biases", "capped"])
def test_a_described_target_in_another_dtype(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Products are converted one after another as they are laid out: no copy of all of them."""
    build(CONFIGS[name]()).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    read = described_target(str(tmp_path), "float32")
    wanted = load_target(str(tmp_path), dtype="float32")
    assert read is not None and read.dtype == torch.float32
    matrices = [t for n, t in read.tensors.items() if "_proj.weight" in n or "lm_head" in n]
    assert matrices and {matrix.dtype for matrix in matrices} == {torch.bfloat16}
    close(run(backend().target(read), read), run(TorchBackend().target(wanted), wanted), 1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_target_is_native(kind: str) -> None:
    """And the same as by its own code, whose layers hold the same weights, but where rounding to 8
    bits makes a small difference large."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    target = Target(build(LlamaConfig(**PLAIN | sizes)), None, "tiny")
    described = describe_target(target)
    assert described is not None
    tensors = {name: tensor.clone() for name, tensor in described.tensors.items()}
    few_bits = DescribedTarget(described.config, tensors, None, "tiny", [], kind)
    model = backend().target(few_bits)
    quantize(target, kind)
    close(run(model, target), run(TorchBackend().target(target), target), 1e-2)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_native_drafter(kind: str, biases: bool, normed: bool, dtype: torch.dtype) -> None:
    sizes = {"attention_bias": biases}
    flags = {"norm_before_residual": normed, "norm_output": normed, "fc_norm": normed}
    compare_drafters(Drafter(head_config(kind=kind, sizes=sizes, **flags)), NativeDrafter, dtype)


@pytest.mark.parametrize(
    ("activation", "kind"), [("silu", NativeDrafter), ("gelu", GenericDrafter)]
)
def test_a_drafter_with_a_window(activation: str, kind: type) -> None:
    sizes = {"hidden_act": activation, "sliding_window": WINDOW}
    compare_drafters(Drafter(head_config(sizes=sizes)), kind, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_tables_of_rope_are_its_own(dtype: torch.dtype) -> None:
    """To the last bit, in any order of positions, after they have grown as well."""
    rotary = Rope(1e5, 2.0).rotary(24)
    table = RotaryTable(rotary, dtype)
    for positions in ([0], [3, 1, 2, 1], [1000, 2], [5], [4095, 4096]):
        at = torch.tensor(positions)
        cos, sin = rotary(torch.empty(0, dtype=dtype), at[None])
        found = table(at)
        assert torch.equal(found[0], cos[0]) and torch.equal(found[1], sin[0])
        assert found[0].dtype == dtype


def test_a_drafter_with_another_activation() -> None:
    config = head_config(sizes={"hidden_act": "gelu"})
    compare_drafters(Drafter(config), GenericDrafter, torch.float32)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 8)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_bf16_drafter_has_int8_products(activation: str, dtype: torch.dtype, bits: int) -> None:
    """But for `fc`. The given one stays as it is; all but products is shared with it."""
    drafter = filled(Drafter(head_config(sizes={"hidden_act": activation})), dtype)
    modules, before = dict(drafter.named_modules()), deepcopy(drafter.state_dict())
    made = backend().drafter(drafter).drafter
    found = [module for module in made.modules() if isinstance(module, CpuLinear)]
    assert len(found) == 2 + 3 * 7 == sum(type(m) is nn.Linear for m in modules.values())
    assert made.fc.weights.bits == 8 * dtype.itemsize
    assert {module.weights.bits for module in found if module is not made.fc} == {bits}
    assert made.norm.weight is drafter.norm.weight and made.d2t is drafter.d2t
    assert dict(drafter.named_modules()) == modules
    assert all(torch.equal(before[name], t) for name, t in drafter.state_dict().items())


def filled(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    drafter = drafter.to(dtype).eval()
    for parameter in drafter.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    return drafter


def compare_drafters(drafter: Drafter, kind: type, dtype: torch.dtype) -> None:
    drafter = filled(drafter, dtype)
    fast = backend().drafter(drafter)
    assert type(fast) is kind
    found = []
    width = drafter.config.feature_width
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(80, width, generator=generator).to(dtype)
    for model in (fast, TorchBackend().drafter(drafter)):
        cache, outs = KVCache(16, drafter.kv_shapes, dtype, torch.device("cpu")), []
        for batch in rounds():
            projected = model.drafter.project(features[: len(batch)])
            out = model.forward(batch, projected, cache)
            outs += [projected, out.normed, out.recurrent, model.drafter.logits(out.normed)]
        found.append(outs + [part for pair in cache.layers for part in pair])
    close(*found, BOUNDS[dtype])


def test_a_target_is_not_changed_by_a_generic_one() -> None:
    target = Target(build(FAMILIES["gemma2"]()), None, "gemma2")
    before = dict(target.model.named_modules())
    model = backend().target(target)
    assert isinstance(model, OwnCodeTarget)
    assert dict(target.model.named_modules()) == before
    mine = {p.data_ptr() for p in target.model.parameters()}
    assert {p.data_ptr() for p in model.target.model.parameters()} <= mine


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
@pytest.mark.parametrize("exact", [False, True])
def test_weights_of_its_own_are_kept_once(family: str, exact: bool) -> None:
    target = Target(build(FAMILIES[family]()), None, family)
    wanted = run(backend(exact=exact).target(target), target)
    weights = {id(m.weight) for m in target.model.modules() if type(m) is nn.Linear}
    model = backend(exact=exact).target(target, own=True)
    assert weights and not any(type(m) is nn.Linear for m in target.model.modules())
    assert all(map(torch.equal, run(model, target), wanted))
    again = backend(exact=exact).target(target)
    assert all(map(torch.equal, run(again, target), wanted)), "what others make of it later"
