"""Rotary position embeddings: what turns queries and keys.

Shapes: T rows, H head size.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rope(NamedTuple):
    """Rotary embeddings of some layers."""

    theta: float
    factor: float = 1.0  # frequencies are divided by it: all, or with `llama3` the low ones
    llama3: tuple[float, float, float] | None = None  # low and high frequency factor, context

    def frequencies(self, head_dim: int) -> Tensor:
        """(H / 2,) float32, as transformers computes them."""
        # Arithmetic on the meta device would import torch's compiler, which takes two seconds.
        powers = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        plain = 1.0 / self.theta**powers
        slow = plain / self.factor
        if self.llama3 is None:
            return slow
        low, high, context = self.llama3
        turns = context * plain / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * slow + kept * plain

    def rotary(self, head_dim: int) -> "Rotary":
        """The module that makes cos and sin."""
        return Rotary(self.frequencies(head_dim))


def rope_of(table: Mapping[str, Any]) -> Rope | None:
    """RoPE by `rope_parameters`; None for a kind that is not described."""
    kind = table.get("rope_type") or table.get("type") or "default"
    theta = table["rope_theta"]
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, table["factor"])
    if kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        low, high, context = (table[name] for name in names)
        return Rope(theta, table["factor"], (low, high, context))
    return None


class Rotary(nn.Module):
    """RoPE frequencies that stay float32 in a drafter of any dtype, as transformers and vLLM keep
    the target's: in bf16 the angle at position 1000 is off by more than a radian."""

    inv_freq: Tensor  # (H / 2,)

    def __init__(self, frequencies: Tensor, scaling: float = 1.0) -> None:
        """`scaling`: factor of cos and sin."""
        super().__init__()
        self.scaling = scaling
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (1, T, H) at positions (1, T), in the dtype of x."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        cos = angles.cos() * self.scaling
        sin = angles.sin() * self.scaling
        return cos.to(x.dtype), sin.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        before = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = before.to(self.inv_freq.device)
        return self
