"""The groups in which vLLM keeps the KV caches of layers: those of a head must be in one."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PretrainedConfig

from peagle.catalog_fields import VllmFlags
from peagle.model.layer_config import LayerConfig, head_size
from peagle.vllm.flags import WHOLE_CACHES
from peagle.vllm.process import older

FULL = "full_attention"
WIDER_GROUPS = "0.18.0"  # the first release with a slack of 1.5 (vllm-project/vllm#36684)


def cache_flags(drafter: LayerConfig, target: PretrainedConfig, version: str) -> VllmFlags:
    """The flags without which vLLM of a version would split the head's KV cache, and end after it
    has loaded everything."""
    slack = 1.25 if older(version, WIDER_GROUPS) else 1.5
    whole = one_group(kinds(target), kind_of(drafter), drafter.num_hidden_layers, slack)
    return {} if whole else WHOLE_CACHES


class Kind(NamedTuple):
    """Shape of a layer's KV cache."""

    attention: str  # as `layer_types` of a configuration has it
    heads: int
    size: int  # of a head


def kinds(target: PretrainedConfig) -> list[Kind]:
    """Return the kinds of the layers that have a KV cache of their own (the last layers of Gemma-4
    may share one)."""
    count = target.num_hidden_layers
    types = getattr(target, "layer_types", None) or [FULL] * count
    layers = getattr(target, "per_layer_config", None) or [target] * count
    cached = count - (getattr(target, "num_kv_shared_layers", None) or 0)
    return [kind_of(layers[i], types[i]) for i in range(cached)]


def kind_of(layer: PretrainedConfig | LayerConfig, attention: str = FULL) -> Kind:
    """Return the kind of a layer. Without a number of key/value heads (GPT-2), each head has its
    own."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return Kind(attention, heads, head_size(layer))


def one_group(target: Sequence[Kind], kind: Kind, draft: int, slack: float) -> bool:
    """Whether vLLM keeps the KV cache of a head's `draft` layers, each of `kind`, in one group.

    vLLM cuts the layers of each kind into groups. A group has the rarest kind's number of layers,
    or the commonest kind's if that is less than `slack` times larger (1.25 before 0.18, then 1.5).
    Caches that all hold every position are one group, whatever their sizes.
    """
    counts = Counter([*target, *[kind] * draft])
    if draft == 1 or all(each.attention == FULL for each in counts):
        return True
    rarest, commonest = min(counts.values()), max(counts.values())
    return counts[kind] <= (commonest if commonest < rarest * slack else rarest)
