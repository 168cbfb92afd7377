"""Decoder layers: Llama's, or Qwen3's with q/k norms.

Shapes: T tokens, D hidden, N query heads, M key/value heads, H head size.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from peagle.model.attention import Attend, AttentionSpec

if TYPE_CHECKING:
    from peagle.model.layer_config import LayerConfig


class DrafterOutput(NamedTuple):
    """Hidden states of the slots after the layers of a head, each (T, D)."""

    normed: Tensor  # what `logits` reads
    recurrent: Tensor  # what EAGLE-3 feeds to the next slot as its feature


class Rotation(NamedTuple):
    """cos and sin of RoPE, each (T, 1, H), the first half of sin negated: then a rotation only
    swaps halves."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> "Rotation":
        """From the tables (1, T, H) that transformers makes."""
        low, high = sin[0].chunk(2, dim=-1)
        return cls(cos[0, :, None], torch.cat([-low, high], dim=-1)[:, None])

    def __call__(self, x: Tensor) -> Tensor:  # (T, heads, H)
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class Attention(nn.Module):
    """Grouped-query attention; `inputs` is 2D in layer 0, which reads embedding and feature."""

    def __init__(self, config: "LayerConfig", inputs: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        qwen3 = config.model_type == "qwen3"
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, keys, bias=bias)
        self.v_proj = nn.Linear(inputs, keys, bias=bias)
        # vLLM's Qwen3 layers have no output bias, its Llama layers do.
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias and not qwen3)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if qwen3 else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if qwen3 else nn.Identity()
        self.spec = AttentionSpec(self.head_dim**-0.5, config.sliding_window)

    def forward(self, x: Tensor, rotate: Rotation, attend: Attend, layer: int) -> Tensor:  # (T, D)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))))
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attend(layer, q, k, v, self.spec).flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, sizes: "LayerConfig") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=sizes.mlp_bias)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=sizes.mlp_bias)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=sizes.mlp_bias)
        self.act = sizes.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A plain pre-norm decoder layer."""

    def __init__(self, config: "LayerConfig", inputs: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, inputs or config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotate: Rotation, attend: Attend, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotate, attend, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class FirstLayer(Layer):
    """Layer 0: queries, keys and values read token and feature, the residual is the feature."""

    def __init__(self, config: "LayerConfig", norm_before_residual: bool) -> None:
        super().__init__(config, inputs=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def fuse(self, embedding: Tensor, feature: Tensor, rotate: Rotation, attend: Attend) -> Tensor:
        """embedding and feature (T, D) → (T, D)."""
        normed = self.hidden_norm(feature)
        x = normed if self.norm_before_residual else feature
        both = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        x = x + self.self_attn(both, rotate, attend, 0)
        return x + self.mlp(self.post_attention_layernorm(x))
