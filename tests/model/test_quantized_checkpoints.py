"""Targets published in few bits, on a machine that has no kernels for them: GPT-OSS's MXFP4 experts
and fp8 with a scale a block are what their numbers mean, in bf16."""

from pathlib import Path
from typing import Any

import torch
from families import build
from json_files import change_json
from safetensors.torch import load_file, save_file
from tiny import make_tokenizer
from torch import Tensor
from transformers import GptOssConfig, PretrainedConfig, Qwen3Config

from peagle.model.attention import CausalAttend
from peagle.model.loader import load_target

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
# The sixteen numbers of e2m1 by their four bits.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save(config: PretrainedConfig, folder: Path) -> dict[str, Tensor]:
    """A random bf16 model with a tokenizer; returns its weights."""
    build(config).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def replace(folder: Path, weights: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """Other weights, and what they are."""
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", quantization_config=quantization)


def logits(folder: Path) -> Tensor:
    target = load_target(str(folder))
    hidden = target.forward(torch.arange(5, 17), torch.arange(12), CausalAttend()).hidden
    return target.logits(hidden)


def test_mxfp4(tmp_path: Path) -> None:
    config = GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    weights = save(config, tmp_path)
    packed, generator = dict(weights), torch.Generator().manual_seed(1)
    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights[name].shape
        shape = (experts, outer, inner // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, shape, dtype=torch.uint8, generator=generator)
        pairs = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1)
        numbers = pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
        weights[name] = numbers.flatten(-2).transpose(1, 2).contiguous().to(torch.bfloat16)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = logits(tmp_path)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": [*skipped, "lm_head"]}
    replace(tmp_path, packed, quantization)
    torch.testing.assert_close(logits(tmp_path), expected, atol=0, rtol=0)


def test_fp8(tmp_path: Path) -> None:
    weights = save(Qwen3Config(**SIZES), tmp_path)
    packed = dict(weights)
    for name in [n for n in weights if "_proj." in n]:
        rows, columns = weights[name].shape
        scale = torch.full((-(-rows // 128), -(-columns // 128)), 2.0**-7)
        scale[0] *= 2
        whole = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        packed[name] = (weights[name].float() / whole).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
        weights[name] = (packed[name].float() * whole).to(torch.bfloat16)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = logits(tmp_path)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic",
                    "weight_block_size": [128, 128]}  # fmt: skip
    replace(tmp_path, packed, quantization)
    torch.testing.assert_close(logits(tmp_path), expected, atol=0, rtol=0)
