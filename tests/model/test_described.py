"""Descriptions of decoders, and targets that are read by them without transformers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import MIXED, PLAIN, WINDOW, build
from json_files import change_json
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from peagle.errors import InputError
from peagle.model.describe import describe
from peagle.model.described import DescribedTarget, LayerFacts
from peagle.model.fingerprints import config_hash, weights_hash
from peagle.model.layer_config import Rope
from peagle.model.loader import described_target, load_target

WORDS = PLAIN | {"vocab_size": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": list(MIXED)}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**WORDS, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(**WORDS | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": MistralConfig(**WORDS, sliding_window=WINDOW, max_position_embeddings=64),
    "qwen2": Qwen2Config(**WORDS),
    "qwen3": Qwen3Config(**WORDS, head_dim=12),
    "gemma3": Gemma3TextConfig(**WORDS | GEMMA | {"tie_word_embeddings": True}),
}
FACTS = (
    "name", "dtype", "device", "kv_shapes", "window", "num_layers", "max_context", "end_ids",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    return save(CONFIGS["qwen2"], tmp_path / "model", tokenizer)


def save(
    config: PretrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerFast, **how: Any
) -> Path:
    build(config).save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder: Path, **options: Any) -> DescribedTarget:
    target = described_target(str(folder), **options)
    assert target is not None
    return target


@pytest.mark.parametrize("size", ["10GB", "40KB"])
@pytest.mark.parametrize("family", CONFIGS)
def test_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, family: str, size: str) -> None:
    """Facts and weights are those of transformers, in one file or several."""
    folder = save(CONFIGS[family], tmp_path / "model", tokenizer, max_shard_size=size)
    found, wanted = opened(folder), load_target(str(folder))
    for name in FACTS:
        assert getattr(found, name) == getattr(wanted, name), name
    assert torch.equal(found.embedding, wanted.embedding)
    assert config_hash(found) == config_hash(wanted)
    assert weights_hash(found) == weights_hash(wanted)
    for layer in range(found.num_layers):
        weights = wanted.layer_weights(layer)
        assert found.layer_weights(layer).keys() == weights.keys()
        assert all(torch.equal(t, weights[n]) for n, t in found.layer_weights(layer).items())
    assert found.tokenizer is not None and wanted.tokenizer is not None
    assert found.tokenizer("the cat") == wanted.tokenizer("the cat")


@pytest.mark.parametrize("family", ["llama", "llama3"])
def test_rotary_frequencies(family: str) -> None:
    config = describe(CONFIGS[family].to_dict())
    assert config is not None
    wanted = build(CONFIGS[family]).get_decoder().rotary_emb.inv_freq
    assert torch.equal(config.ropes[0].frequencies(config.head_dim), wanted)


def test_dtypes(folder: Path) -> None:
    assert opened(folder).dtype == torch.float32
    assert opened(folder, dtype="bfloat16").embedding.dtype == torch.bfloat16
    change_json(folder / "config.json", dtype="bfloat16")
    assert opened(folder).dtype == torch.bfloat16
    change_json(folder / "config.json", dtype="float16")
    assert described_target(str(folder)) is None
    assert opened(folder, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_config_without_a_dtype(folder: Path, dtype: torch.dtype) -> None:
    """The files decide: native code has no such numbers."""
    file = folder / "model.safetensors"
    save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file, {"format": "pt"})
    change_json(folder / "config.json", dtype=None)
    assert described_target(str(folder)) is None
    assert opened(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_weights_of_several_dtypes(folder: Path) -> None:
    """As transformers reads them: in one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias")
    save_file(tensors | {name: tensors[name].double() for name in names}, file, {"format": "pt"})
    change_json(folder / "config.json", dtype=None)
    found, wanted = opened(folder), load_target(str(folder)).model.state_dict()
    for name in names:
        assert found.tensors[name].dtype == torch.float32
        assert torch.equal(found.tensors[name], wanted[name])


def test_configs_before_transformers_5() -> None:
    old: dict[str, Any] = CONFIGS["gemma3"].to_dict() | {"rope_theta": 1e6}
    for name in ("rope_parameters", "layer_types"):
        del old[name]
    old |= {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}
    old |= {"sliding_window_pattern": 3}
    config = describe(old)
    assert config is not None
    assert config.ropes == (Rope(1e6, 8.0), Rope(1e4))
    near, far = LayerFacts(WINDOW, 1), LayerFacts(0, 0)
    assert config.layers == (near, near, far, near)


@pytest.mark.parametrize("window", [WINDOW, None])
def test_all_layers_of_mistral_have_one_window(window: int | None) -> None:
    """Its own code does not read `layer_types`."""
    mistral = CONFIGS["mistral"].to_dict() | {"sliding_window": window}
    for types in (None, ["full_attention"] * 4, ["sliding_attention"] * 4):
        config = describe(mistral | {"layer_types": types})
        assert config is not None
        assert config.layers == (LayerFacts(window or 0, 0),) * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": None},
        {"quantization_config": {"quant_method": "awq"}},
        {"auto_map": {"AutoModelForCausalLM": "mine.Model"}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 4},
        {"layer_types": ["chunked_attention"] * 4},
        {"model_type": "mistral", "sliding_window": None},
    ],
)
def test_a_config_that_is_not_described(folder: Path, changes: dict[str, Any]) -> None:
    change_json(folder / "config.json", **changes)
    assert described_target(str(folder)) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-500])


def without_norm(file: Path) -> None:
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)


def transposed(file: Path) -> None:
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].T.contiguous()}, file)


@pytest.mark.parametrize("damage", [cut, without_norm, transposed])
def test_damaged_weights(folder: Path, damage: Any) -> None:
    damage(folder / "model.safetensors")
    change_json(folder / "config.json", dtype=None)
    with pytest.raises(InputError) as error:
        described_target(str(folder))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": {"model.norm.weight": "../model.safetensors"}}']
)
def test_a_damaged_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match="index"):
        described_target(str(folder))
