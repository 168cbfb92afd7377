"""A target as engines and heads know it; subclasses have the weights.

Shapes: T rows, E target hidden, F feature layers, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.errors import InputError
from peagle.model.attention import HeadShape


class TargetOutput(NamedTuple):
    """The output of a forward of T rows."""

    hidden: Tensor  # (T, E), the input of the output head
    features: Tensor  # (T, F·E), the drafter's input


class BaseTarget:
    """A target model and its tokenizer. It never changes once it is made, so any number of engines
    may use one at the same time."""

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    config: Any  # sizes, by the names of transformers
    device: torch.device
    dtype: torch.dtype
    kv_shapes: list[HeadShape]  # keys and values of each layer
    window: int  # newest positions that a row sees, in any layer
    end_ids: list[int]  # token ids that end an answer, by the generation config
    quantize: str | None = None  # int8 or int4, of the layers' weights
    runs: bool = False  # whether it is a `Target` with a `forward` of its own

    @property
    def embedding(self) -> Tensor:
        """The input embedding table (V, E)."""
        raise NotImplementedError

    def layer_weights(self, layer: int) -> Mapping[str, Tensor]:
        """The weights of a decoder layer by their names."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.kv_shapes)

    @property
    def max_context(self) -> int:
        """Longest sequence, prompt and output, the target was made for: with LongRoPE, by the
        factors for short ones, as in vLLM where no length is given."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        longest = [getattr(self.config, "max_position_embeddings", None) or 1 << 30]
        for table in [rope, *rope.values()]:  # one for all layers, or one for each kind
            if isinstance(table, dict) and table.get("rope_type") == "longrope":
                longest.append(table["original_max_position_embeddings"])
        return min(longest)

    @property
    def end_tokens(self) -> set[int]:
        """Ids that end an answer: the generation config's, and the tokenizer's eos."""
        return {*self.end_ids, *listed(getattr(self.tokenizer, "eos_token_id", None))}

    def check_layers(self, layers: Sequence[int]) -> None:
        """Raises InputError for feature layers that the target does not have."""
        last = self.num_layers
        if any(not 0 <= layer <= last for layer in layers):
            why = f"{self.name} has layers 0 to {last - 1}, and {last} is the output of the last"
            raise InputError(why, field="feature_layers", value=list(layers))


def listed(ids: list[int] | int | None) -> list[int]:
    """Token ids of a config, which has one, several or none."""
    return [ids] if isinstance(ids, int) else ids or []
