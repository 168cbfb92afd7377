"""Sizes and facts of a head's decoder layers, by the names of transformers' configs, and rotary
position embeddings, which turn queries and keys.

Shapes: T rows, H head size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.errors import InputError, check_at_least

CONTEXT = "original_max_position_embeddings"  # before RoPE was scaled
# Of Meta's models, besides their factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, CONTEXT: 8192}


class Rope(NamedTuple):
    """Rotary embeddings of some layers."""

    theta: float
    factor: float = 1.0  # frequencies are divided by it: all, or with `llama3` the low ones
    llama3: tuple[float, ...] | None = None  # low and high frequency factor, context

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
        return Rope(theta, table["factor"], tuple(table[name] for name in LLAMA3))
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


KINDS = ("llama", "qwen3")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
DEFAULT_ROPE: dict[str, Any] = {"rope_theta": 10_000.0, "rope_type": "default"}
FULL, SLIDING = "full_attention", "sliding_attention"  # in `layer_types`
COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Llama's layers, or Qwen3's. Importing transformers' own config takes two seconds.

    Raises InputError for other layers, unknown activations and values of another type.
    """

    model_type: str = "llama"
    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0  # 0: as many as query heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=DEFAULT_ROPE.copy)
    sliding_window: int | None = None  # a slot sees this many, itself included; None: all

    def __post_init__(self) -> None:
        for name, known in {"model_type": KINDS, "hidden_act": tuple(ACTIVATIONS)}.items():
            if getattr(self, name) not in known:
                fix = f"heads have {' or '.join(known)}"
                raise InputError("unknown", field=name, value=getattr(self, name), fix=fix)
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        counts = {name: getattr(self, name) for name in COUNTS}
        check_at_least(1, sliding_window=self.sliding_window, **counts)
        if not isinstance(self.rms_norm_eps, float | int):
            raise InputError("must be a number", field="rms_norm_eps", value=self.rms_norm_eps)
        if not isinstance(self.rope_parameters, dict):
            raise InputError("must be an object", field="rope_parameters")

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The function `hidden_act`."""
        return ACTIVATIONS[self.hidden_act]

    def rotary(self) -> Rotary:
        """The rotary embedding by `rope_parameters`; of rare kinds by transformers' code."""
        if (rope := rope_of(self.rope_parameters)) is not None:
            return rope.rotary(self.head_dim)
        from transformers.models.llama import modeling_llama as llama  # noqa: PLC0415 (two seconds)

        config = llama.LlamaConfig(**self.to_json() | {"model_type": "llama"})
        made = llama.LlamaRotaryEmbedding(config)
        return Rotary(made.inv_freq, made.attention_scaling)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """The config of a config.json; other keys are left out."""
        given = {key: raw[key] for key in LAYER_KEYS if raw.get(key) is not None}
        if SLIDING not in (raw.get("layer_types") or ()):  # as in vLLM, the window is then unused
            given.pop("sliding_window", None)
        if "rope_parameters" not in given:  # the keys of transformers 4
            scaling = dict(raw.get("rope_scaling") or {})
            kind = scaling.pop("type", "default")
            theta = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
            given["rope_parameters"] = DEFAULT_ROPE | {"rope_type": kind} | scaling | theta
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The keys of config.json."""
        keys = asdict(self)
        if self.sliding_window is None:
            del keys["sliding_window"]
        else:  # vLLM reads the first, transformers' Qwen3 the second as well
            keys["layer_types"] = [SLIDING] * self.num_hidden_layers
            keys["use_sliding_window"] = True
        return keys


LAYER_KEYS = frozenset(field.name for field in fields(LayerConfig))


def head_size(config: Any) -> int:
    """Head size H of a config of transformers: named, or hidden_size / num_attention_heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
