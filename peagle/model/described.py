"""A decoder by its description: a dozen facts, and the weights, by which native code runs it.

A family that needs more facts is not described; its own code runs it (model/target.py).

Shapes: V vocabulary, E hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.model.attention import HeadShape
from peagle.model.base_target import BaseTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.model.layer_config import Rope

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


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
    tied: bool  # weights without an output head have the embedding table as one
    biased: frozenset[str]  # linear layers that have a bias, as q_proj
    qk_norm: bool  # norms of queries and keys
    sandwich: bool  # Gemma: norms after attention and feed-forward, too; their weights are w - 1
    logit_softcap: float | None
    layers: tuple[LayerFacts, ...]
    ropes: tuple["Rope", ...]
    dtype: str | None  # of the checkpoint, as float32

    @property
    def product_inputs(self) -> set[int]:
        """Numbers of inputs of the layers' products."""
        heads = self.num_attention_heads * self.head_dim
        return {self.hidden_size, self.intermediate_size, heads}

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


def below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Weights whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


@dataclass(eq=False, repr=False)
class DescribedTarget(BaseTarget):
    """A target by its description and its weights, on the CPU. Its dtype is that of the embedding;
    the matrices of products may have that of their files."""

    config: Described
    tensors: Mapping[str, Tensor]  # by transformers' names, see describe.check_weights
    tokenizer: "PreTrainedTokenizerBase | None"
    name: str
    end_ids: list[int]
    quantize: str | None = None  # int8 or int4, in which the backend keeps the weights
    digests: Sequence[str] = ()  # of the files of its weights, where these are known

    def __post_init__(self) -> None:
        config = self.config
        self.device = torch.device("cpu")
        self.dtype = self.embedding.dtype
        shape = HeadShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.kv_shapes = [shape] * len(config.layers)
        self.window = max(layer.window or self.max_context for layer in config.layers)

    @property
    def embedding(self) -> Tensor:
        """See `BaseTarget.embedding`."""
        return self.tensors[EMBEDDING]

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """See `BaseTarget.layer_weights`."""
        return below(self.tensors, f"model.layers.{layer}.")
