"""The drafter over training elements: its attention on this device, and its compiled layers.

Shapes: N tokens, E elements, D drafter hidden.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from peagle.methods.base import Elements, TrainingPass
from peagle.methods.registry import method_of
from peagle.model.attention import Attend
from peagle.model.drafter import Drafter
from peagle.model.layers import FirstLayer
from peagle.train.attention import BlockAttend, FlexAttend, block_mask, visible
from peagle.train.batches import PackedDocuments


def run_drafter(
    drafter: Drafter, sequence: PackedDocuments, features: Tensor, elements: Elements
) -> Tensor:
    """Normed hidden states (E, D) of all elements."""
    features = features.to(drafter.norm.weight.dtype)
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else features.dtype
    inputs = TrainingPass(
        sequence.ids,
        sequence.positions,
        features,
        elements,
        partial(_attend, documents=sequence.documents, dtype=dtype),
        partial(visible, documents=sequence.documents),
    )
    return method_of(drafter.config).train_forward(drafter, inputs)


def _attend(elements: Elements, documents: Tensor, dtype: torch.dtype) -> Attend:
    if elements.anchor.is_cuda:
        return FlexAttend(block_mask(elements, documents), _compiled_flex())
    return BlockAttend(elements, documents, dtype)  # FlexAttention has no backward on the CPU


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def recompute_layers(drafter: Drafter) -> None:
    """Compute activations of layers again in backward, instead of keeping them."""
    _wrap_layers(drafter, lambda run: partial(checkpoint, run, use_reentrant=False))


def compile_layers(drafter: Drafter) -> None:
    """Fuse the operations between the matrix products of a head whose layers run once a pass.
    Lengths are dynamic: layer 0 is compiled once, and the others, being alike, once together."""
    _wrap_layers(drafter, partial(torch.compile, dynamic=True))


def _wrap_layers(drafter: Drafter, wrap: Callable[..., Any]) -> None:
    first, *others = drafter.layers
    first = cast(FirstLayer, first)
    first.fuse = wrap(first.fuse)  # type: ignore[method-assign]
    for layer in others:  # `forward`, not the module: hooks of FSDP and DDP stay outside
        layer.forward = wrap(layer.forward)
