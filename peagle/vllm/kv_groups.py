"""How vLLM groups the KV caches of a target's layers and a head's."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PretrainedConfig

from peagle.model.layers import head_size

FULL = "full_attention"


class Kind(NamedTuple):
    """What a layer's KV cache is like."""

    attention: str  # as `layer_types` of a configuration has it
    heads: int
    size: int  # of a head


def kinds(target: PretrainedConfig) -> list[Kind]:
    """Return the kinds of the layers that have a KV cache of their own (the last layers of Gemma-4
    may share one)."""
    count = target.num_hidden_layers
    types = getattr(target, "layer_types", None) or [FULL] * count
    layers = getattr(target, "per_layer_config", None) or [target] * count
    own = count - (getattr(target, "num_kv_shared_layers", None) or 0)
    return [kind_of(layers[i], types[i]) for i in range(own)]


def kind_of(layer: PretrainedConfig, attention: str = FULL) -> Kind:
    """Return the kind of a layer. Without a number of key/value heads (GPT-2), each head has its
    own."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return Kind(attention, heads, head_size(layer))


def one_group(target: Sequence[Kind], own: Kind, draft: int, slack: float) -> bool:
    """Whether vLLM keeps the KV cache of a head's `draft` layers, each `own`, in one group, which
    it asserts after it has loaded everything.

    vLLM cuts the layers of each kind into groups of as many as the rarest kind has, or of as many
    as the commonest has where that is less than `slack` times as many (1.5 in 0.32). Caches that
    all hold every position are one group whatever their sizes.
    """
    counts = Counter([*target, *[own] * draft])
    if draft == 1 or all(kind.attention == FULL for kind in counts):
        return True
    least, most = min(counts.values()), max(counts.values())
    return counts[own] <= (most if most < least * slack else least)
