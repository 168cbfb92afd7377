"""Tiny random models of every family the engine knows, from their own configurations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4Config,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 67
WINDOW = 4
TAPS = (1, 2, 3)
LEFT = (*TAPS, 4)  # and what leaves the last layer
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, **LAYERS}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {**SIZES, **SPECIAL, "tie_word_embeddings": False}
MIXED = ["sliding_attention", "full_attention"] * 2


def _gemma4_text() -> dict[str, object]:
    return {
        **SIZES, **SPECIAL, "head_dim": 8, "global_head_dim": 16, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "num_kv_shared_layers": 2, "layer_types": list(MIXED),
        "sliding_window": WINDOW, "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    }  # fmt: skip


def _gemma4_multimodal() -> Gemma4Config:
    """A text decoder inside a multimodal model, as in the published Gemma-4 checkpoints."""
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    others = {"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62}
    others |= {"boi_token_id": 63, "eoi_token_id": 64, "boa_token_id": 65, "audio_config": None}
    return Gemma4Config(text_config=_gemma4_text(), vision_config=vision, **others)


def _gpt_oss() -> GptOssConfig:
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 8, "rope_theta": 10000.0,
    }  # fmt: skip
    return GptOssConfig(
        **PLAIN, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        layer_types=list(MIXED), rope_parameters=yarn, max_position_embeddings=64,
    )  # fmt: skip


def _deepseek() -> DeepseekV3Config:
    sizes = {**PLAIN, "num_key_value_heads": 4}
    return DeepseekV3Config(
        **sizes, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, n_routed_experts=2, moe_intermediate_size=16, n_group=1, topk_group=1,
        num_experts_per_tok=1, first_k_dense_replace=1,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**PLAIN, attention_bias=True),
    "qwen3": lambda: Qwen3Config(
        **PLAIN, head_dim=12, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **PLAIN, head_dim=12, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": _gpt_oss,
    "gemma2": lambda: Gemma2Config(
        **SIZES, **SPECIAL, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0
    ),
    "gemma4": lambda: Gemma4TextConfig(**_gemma4_text()),
    "gemma4_multimodal": _gemma4_multimodal,
    "deepseek_v3": _deepseek,
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2
    ),
}


def build(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with eager attention, every weight drawn, also those that start as zero, one
    or uninitialised: a sink, norm or bias that is ignored must show."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else 1 + noise * 0.3)
    return model.eval()


@dataclass
class Reference:
    """Results of transformers itself for a sequence: logits (T, V), features (T, F·E) of LEFT,
    the last before the final norm."""

    ids: Tensor
    logits: Tensor
    features: Tensor


@torch.no_grad()
def reference(model: PreTrainedModel, ids: Tensor) -> Reference:
    parts = model.get_decoder().modules()
    layers = next(part for part in parts if isinstance(part, ModuleList) and len(part) == 4)
    left = list[Tensor]()
    hook = layers[-1].register_forward_hook(lambda _, __, out: left.append(out))
    out = model(ids[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    states = [*(out.hidden_states[layer] for layer in TAPS), left[0]]
    return Reference(ids, out.logits[0], torch.cat(states, dim=-1)[0])


def random_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
