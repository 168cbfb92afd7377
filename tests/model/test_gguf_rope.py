"""The scaling of RoPE in GGUF files, which transformers does not read: computed, or refused."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf_files import HIDDEN, write_gguf
from json_files import change_json, read_json
from refusals import refused
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    StableLmConfig,
    Starcoder2Config,
)

from peagle.backends.batch import Batch, Span, blocks_of
from peagle.backends.choose import choose_backend
from peagle.backends.kv_cache import KVCache
from peagle.model.base_target import BaseTarget
from peagle.model.loader import _add_scaling, described_target, load_target, locate

HEAD_DIM = HIDDEN // 2
THETA = 10_000.0  # where the file names none
IDS = [3 + i % 30 for i in range(60)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "targets"


def plain_frequencies(head_dim: int = HEAD_DIM) -> np.ndarray:
    return np.float32(THETA) ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)


def llama3_factors(factor: float, head_dim: int = HEAD_DIM) -> np.ndarray:
    """As convert_hf_to_gguf.py of llama.cpp writes them."""
    found = []
    for frequency in plain_frequencies(head_dim):
        wavelength = 2 * math.pi / frequency
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / factor + smooth)
        short, long = wavelength < 8192 / 4.0, wavelength > 8192 / 1.0
        found.append(1.0 if short else factor if long else between)
    return np.array(found, dtype=np.float32)


def logits(target: BaseTarget) -> Tensor:
    """Logits of IDS, by the backend for the target."""
    model = choose_backend(target.device, target.dtype).target(target)
    blocks = range(blocks_of(len(IDS)))
    kv_cache = KVCache(len(blocks), target.kv_shapes, target.dtype, target.device)
    return model.logits(model.forward(Batch.of([Span(blocks, 0, IDS)]), kv_cache, ()).hidden)


def native(name: Path) -> BaseTarget:
    target = described_target(str(name), "float32")
    assert target is not None
    return target


def own_code(name: Path) -> BaseTarget:
    return load_target(str(name), dtype="float32")


def with_rope(tmp_path: Path, **rope: object) -> Path:
    """The folder of a model of transformers with the weights of the files, and other RoPE."""
    plain = write_gguf(tmp_path / "plain.gguf")
    folder = tmp_path / "model"
    shutil.copytree(locate(str(plain))[0], folder)
    change_json(folder / "config.json", rope_parameters={"rope_theta": THETA, **rope})
    return folder


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("load", [native, own_code])
def test_factors_of_llama3_give_the_logits_of_the_model(
    load: Any, factor: float, tmp_path: Path
) -> None:
    scaled = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = with_rope(tmp_path, **scaled)
    tensors = {"rope_freqs": llama3_factors(factor)}
    file = write_gguf(tmp_path / "scaled.gguf", tensors=tensors)
    found = logits(load(file))
    assert torch.equal(found, logits(load(model)))
    assert not torch.allclose(found, logits(load(tmp_path / "plain.gguf")), rtol=1e-2)


@pytest.mark.parametrize("load", [native, own_code])
@pytest.mark.parametrize(
    "fields",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0, "rope.scaling.finetuned": 1.0},
        {"rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling(load: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    model = with_rope(tmp_path, rope_type="linear", factor=4.0)
    file = write_gguf(tmp_path / "scaled.gguf", fields=fields)
    assert torch.equal(logits(load(file)), logits(load(model)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0},
        {"rope.scaling.factor": 0.0},
    ],
)
def test_no_scaling(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(locate(str(write_gguf(tmp_path / "plain.gguf", fields=fields)))[0])
    assert read_json(folder / "config.json")["rope_parameters"] == {
        "rope_type": "default", "rope_theta": THETA,
    }  # fmt: skip


@pytest.mark.parametrize("context", [None, 16.0])
def test_yarn_is_that_of_llama_cpp(context: float | None, tmp_path: Path) -> None:
    """`ggml_rope_yarn_corr_dims` and `rope_yarn`; the context before is the file's, else that of
    the model."""
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    if context is not None:
        fields["rope.scaling.original_context_length"] = context
    target = load_target(str(write_gguf(tmp_path / "scaled.gguf", fields=fields)))
    ends = [
        HEAD_DIM * math.log((context or 64) / (turns * 2 * math.pi)) / (2 * math.log(THETA))
        for turns in (32, 1)
    ]
    low, high = max(0, math.floor(ends[0])), min(HEAD_DIM - 1, math.ceil(ends[1]))
    ramp = ((np.arange(HEAD_DIM // 2) - low) / max(0.001, high - low)).clip(0, 1)
    plain = plain_frequencies()
    rotary = target.decoder.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq, plain / 4 * ramp + plain * (1 - ramp), rtol=1e-5)
    assert rotary.attention_scaling == pytest.approx(1 + 0.1 * math.log(4))


def test_gemma3_is_scaled_in_full_attention_alone(tmp_path: Path) -> None:
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    file = write_gguf(tmp_path / "gemma.gguf", architecture="gemma3", fields=fields)
    config = Gemma3TextConfig(rope_theta=1e6)
    _add_scaling(config, GGUFReader(file), file.name)
    full, near = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert full == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert near == {"rope_type": "default", "rope_theta": 1e4}


def test_gemma4_says_the_same_in_its_config(tmp_path: Path) -> None:
    tensors = {"rope_freqs": np.array([1.0] * 64 + [1e30] * 192, dtype=np.float32)}
    file = write_gguf(tmp_path / "gemma.gguf", architecture="gemma4", tensors=tensors)
    config = Gemma4TextConfig()
    _add_scaling(config, GGUFReader(file), file.name)
    assert config.rope_parameters == Gemma4TextConfig().rope_parameters


@pytest.mark.parametrize("kind", [Starcoder2Config, StableLmConfig])
def test_the_base_is_that_of_the_file(kind: Any, tmp_path: Path) -> None:
    """Transformers does not read it of these two."""
    config, fields = kind(), {"rope.freq_base": 1e6}
    file = write_gguf(tmp_path / "a.gguf", architecture=config.model_type, fields=fields)
    _add_scaling(config, GGUFReader(file), file.name)
    assert config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("config", "scalar"),
    [
        (Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32), 168),
        (Gemma2Config(num_hidden_layers=46, hidden_size=4608, num_attention_heads=32), 144),
        (Gemma3TextConfig(num_hidden_layers=48, hidden_size=3840, num_attention_heads=16), 256),
        (Gemma2Config(num_hidden_layers=42, hidden_size=3584, num_attention_heads=16), 256),
    ],
)
def test_attention_of_gemmas_27b_models(config: Any, scalar: int, tmp_path: Path) -> None:
    """llama.cpp scales theirs by other numbers than the head size, which no file has."""
    file = write_gguf(tmp_path / "gemma.gguf")
    _add_scaling(config, GGUFReader(file), file.name)
    assert config.query_pre_attn_scalar == scalar


FACTORS = {"rope_freqs": llama3_factors(8.0)}


@pytest.mark.parametrize(
    ("fields", "tensors", "named"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, {}, "rope.scaling.type"),
        ({"rope.scaling.attn_factor": 1.2}, {}, "rope.scaling.attn_factor"),
        ({}, {"rope_factors_long": FACTORS["rope_freqs"]}, "rope_factors_long.weight"),
        ({}, {"rope_freqs": FACTORS["rope_freqs"] * 1.01}, "rope_freqs.weight"),
        ({}, {"rope_freqs": llama3_factors(8.0, 2 * HEAD_DIM)}, "rope_freqs.weight"),
        ({"rope.scaling.factor": 4.0}, FACTORS, "rope_freqs.weight"),
    ],
)
def test_other_scaling_is_refused_by_name(
    fields: dict[str, Any], tensors: dict[str, Any], named: str, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "odd.gguf", fields=fields, tensors=tensors)
    with refused("target") as error:
        locate(str(file))
    assert error.value.why.endswith(f"its {named}") and "folder" in str(error.value.fix)
    assert [*cache.iterdir()] == []


@pytest.mark.parametrize("prefix", ["gguf", "gguf-rope", "gguf-ends"])
def test_what_earlier_versions_unpacked_is_not_used(
    prefix: str, tmp_path: Path, cache: Path
) -> None:
    """The first did not read the scaling, the next one not the ends of turns, the last one not
    RoPE's base of all families."""
    file = write_gguf(tmp_path / "scaled.gguf", tensors=FACTORS, tokens={7: "<end_of_turn>"})
    made = Path(locate(str(file))[0])
    digest = made.name[-16:]
    before = made.rename(cache / f"{prefix}-{digest}")
    change_json(before / "config.json", rope_parameters={"rope_theta": THETA})
    change_json(before / "generation_config.json", eos_token_id=0)
    again = Path(locate(str(file))[0])
    assert read_json(again / "config.json")["rope_parameters"]["rope_type"] == "llama3"
    assert read_json(again / "generation_config.json")["eos_token_id"] == [0, 7]
