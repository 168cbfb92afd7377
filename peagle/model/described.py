"""Description of a decoder: a dozen facts of its config.json, by which native code runs it.

A family that needs more is not described here; its own code runs it (model/target.py).

Shapes: T rows, H head size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

FAMILIES = {"llama", "qwen2", "qwen3", "gemma3_text"}
QK_NORM = {"qwen3", "gemma3_text"}
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Rope(NamedTuple):
    """Rotary embeddings of some layers."""

    theta: float
    factor: float = 1.0  # frequencies are divided by it: all, or with `llama3` the low ones
    llama3: tuple[float, float, float] | None = None  # low and high frequency factor, context

    def frequencies(self, head_dim: int) -> Tensor:
        """(H / 2,) float32, as transformers computes them."""
        powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / self.theta**powers
        slow = plain / self.factor
        if self.llama3 is None:
            return slow
        low, high, context = self.llama3
        turns = context * plain / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * slow + kept * plain


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer's attention."""

    window: int  # newest positions that a row sees; 0: all
    rope: int  # index in `Described.ropes`


@dataclass(frozen=True, slots=True)
class Described:
    """A decoder of pre-norm layers with gated feed-forwards."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str  # silu | gelu_tanh
    attention_scale: float
    embedding_scale: float
    tied: bool  # the output head is the embedding table
    biased: frozenset[str]  # linear layers that have a bias, as q_proj
    qk_norm: bool  # norms of queries and keys
    sandwich: bool  # Gemma: norms after attention and feed-forward, too; their weights are w - 1
    logit_softcap: float | None
    layers: tuple[LayerFacts, ...]
    ropes: tuple[Rope, ...]
    dtype: str | None  # of the checkpoint, as float32

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


def describe(config: Mapping[str, Any]) -> Described | None:
    """The description of a config.json of transformers; None if it is incomplete."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return None
    try:
        return _described(config, gemma=family == "gemma3_text")
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _described(config: Mapping[str, Any], *, gemma: bool) -> Described | None:
    activation = ACTIVATIONS.get(config["hidden_activation" if gemma else "hidden_act"])
    ropes = _ropes(config)
    if activation is None or ropes is None or config.get("use_bidirectional_attention"):
        return None
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or width // heads
    scale = config["query_pre_attn_scalar"] if gemma else head_dim
    return Described(
        model_type=config["model_type"],
        hidden_size=width,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        num_attention_heads=heads,
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        activation=activation,
        attention_scale=scale**-0.5,
        embedding_scale=width**0.5 if gemma else 1.0,
        tied=config.get("tie_word_embeddings", gemma),
        biased=_biased(config),
        qk_norm=config["model_type"] in QK_NORM,
        sandwich=gemma,
        logit_softcap=config.get("final_logit_softcapping"),
        layers=tuple(_layers(config, list(ropes))),
        ropes=tuple(ropes.values()),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _biased(config: Mapping[str, Any]) -> frozenset[str]:
    """Linear layers with a bias."""
    if config["model_type"] == "qwen2":
        return frozenset(QKV)
    attention = (*QKV, "o_proj") if config.get("attention_bias") else ()
    return frozenset((*attention, *(MLP if config.get("mlp_bias") else ())))


def _layers(config: Mapping[str, Any], kinds: list[str]) -> list[LayerFacts]:
    """Window and RoPE of each layer. Raises KeyError if config.json is ambiguous."""
    count = config["num_hidden_layers"]
    types: list[str] | None = config.get("layer_types")
    if types is None and "sliding_window_pattern" in config:  # Gemma, before transformers 5
        pattern = config["sliding_window_pattern"]
        types = [SLIDING if (layer + 1) % pattern else FULL for layer in range(count)]
    if types is None and not config.get("use_sliding_window"):
        types = [FULL] * count
    if types is None or len(types) != count:
        raise KeyError("layer_types")
    windows = {FULL: 0, SLIDING: config.get("sliding_window") or 0}
    ropes = {kind: kinds.index(kind) if kind in kinds else 0 for kind in windows}
    return [LayerFacts(windows[kind], ropes[kind]) for kind in types]


def _ropes(config: Mapping[str, Any]) -> dict[str, Rope] | None:
    """RoPE by kind of layer, or of all layers as "". None: of a kind that is not described."""
    found = config.get("rope_parameters")
    if found is None:  # as transformers wrote them before version 5
        found = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
        if "rope_local_base_freq" in config:
            found = {FULL: found, SLIDING: {"rope_theta": config["rope_local_base_freq"]}}
    tables = found if FULL in found else {"": found}
    ropes = {kind: rope_of(table) for kind, table in tables.items()}
    known = {kind: rope for kind, rope in ropes.items() if rope is not None}
    return known if len(known) == len(ropes) else None


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
