"""The forwards of training: the target's over packed documents, without gradient, and the drafter's
over elements.

Shapes: N tokens, T rows, R rows, E elements or the target's hidden size, F·E features, D drafter
hidden, V draft vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from peagle.methods.base import Elements, TrainingPass
from peagle.methods.registry import method_of
from peagle.model.attention import Attend, AttentionSpec, CausalAttend
from peagle.model.base_target import TargetOutput
from peagle.model.drafter import Drafter
from peagle.model.layers import FirstLayer
from peagle.model.tensors import pad_rows, precise
from peagle.train.attention import BlockStep, FlexStep, StepsAttend, block_mask, in_tiles
from peagle.train.batches import PackedDocuments

if TYPE_CHECKING:  # a target is an argument, as a backend is
    from peagle.model.target import Target

LINEAR = F.linear  # torch's own


def run_target(target: "Target", sequence: PackedDocuments, taps: tuple[int, ...]) -> TargetOutput:
    """Hidden states (N, E) for labels and, of the layers `taps`, features (N, F·E) for the drafter,
    without gradient."""
    attend = DocumentsAttend(sequence)
    out = target.forward(pad_rows(sequence.ids), pad_rows(sequence.positions), attend, taps)
    return TargetOutput(*(rows[: len(sequence.ids)] for rows in out))


def run_document(target: "Target", ids: list[int], taps: tuple[int, ...]) -> TargetOutput:
    """`run_target` over one document."""
    tokens = torch.tensor(ids, device=target.device)
    zeros = torch.zeros_like(tokens)
    return run_target(target, PackedDocuments(tokens, zeros.bool(), zeros), taps)


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bf16 faster than float32. A CPU without instructions for
    bf16 trains about 20 times as slowly in it."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _in_float(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kind = precise(x.dtype)
    return LINEAR(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)).to(x.dtype)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Have all linear layers that run meanwhile multiply as fast as the device can: those of bf16
    in float32 where it has no products of bf16, rounded to bf16. (Not by a TorchFunctionMode: the
    threads of process groups would keep it, and wait for Python to let it go.)"""
    F.linear = LINEAR if multiplies_bf16(device) else _in_float  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = LINEAR


class DocumentsAttend:
    """Attend of the target over packed documents, each causal and alone. Nothing sees the rows that
    fill a document's tiles, which come after it; rows after the last document are not attended."""

    def __init__(self, sequence: PackedDocuments) -> None:
        documents = sequence.documents
        _, number, counts = documents.unique_consecutive(return_inverse=True, return_counts=True)
        self.lengths = counts.tolist()
        # Where each row is in a table of documents, all as long as the longest.
        self.cells = number * max(self.lengths) + sequence.positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if q.is_cuda and spec == AttentionSpec(spec.scale):
            return self.together(q, k, v, spec.scale)
        split = (x[: len(self.cells)].split(self.lengths) for x in (q, k, v))
        outputs = []
        for length, *part in zip(self.lengths, *split, strict=True):
            q, k, v = map(pad_rows, part)
            outputs.append(CausalAttend()(layer, q, k, v, spec)[:length])
        return pad_rows(torch.cat(outputs))

    def together(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """All documents in one call, which saves a GPU many small ones."""
        table = len(self.lengths), max(self.lengths)

        def filled(x: Tensor) -> Tensor:  # (T, N, H) → (documents, N, longest, H)
            empty = x.new_zeros(table[0] * table[1], *x.shape[1:])
            rows = empty.index_copy(0, self.cells, x[: len(self.cells)])
            return rows.unflatten(0, table).transpose(1, 2)

        q, k, v = map(filled, (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return pad_rows(out.transpose(1, 2).flatten(0, 1)[self.cells])


def logits_of(target: "Target", ids: Tensor) -> Callable[[Tensor], Tensor]:
    """A function (R, E) → (R, V): the target's logits of the tokens `ids` (V,) only, by its
    own head with a copy of their rows of the output layer."""
    output = target.model.get_output_embeddings()
    rows = nn.Linear(output.weight.shape[1], len(ids), bias=False, device="meta")
    rows.weight = nn.Parameter(output.weight[ids], requires_grad=False)
    if output.bias is not None:
        rows.bias = nn.Parameter(output.bias[ids], requires_grad=False)
    [name] = [name for name, child in target.model.named_children() if child is output]
    head = copy(target.head)
    head._modules = head._modules | {name: rows}

    @torch.no_grad()
    def logits(hidden: Tensor) -> Tensor:
        return cast(Tensor, head(inputs_embeds=hidden[None], use_cache=False).logits)[0]

    return logits


def run_drafter(
    drafter: Drafter, sequence: PackedDocuments, features: Tensor, elements: Elements
) -> Tensor:
    """Normed hidden states (E, D) of all elements."""
    features = features.to(drafter.norm.weight.dtype)
    window = drafter.config.transformer.sliding_window
    attend = partial(_attend, elements, sequence.documents, window)
    inputs = TrainingPass(sequence.ids, sequence.positions, features, elements, attend)
    return method_of(drafter.config).train_forward(drafter, inputs)


def _attend(
    elements: Elements, documents: Tensor, window: int | None, counts: Sequence[int]
) -> Attend:
    """Attend of forwards that run these counts of the elements, one after another."""

    tiled, steps = in_tiles(elements, counts)
    if documents.is_cuda:
        masks = [block_mask(tiled, documents, step, window) for step in steps]
        return StepsAttend([FlexStep(mask, _compiled_flex()) for mask in masks])
    # FlexAttention has no backward on the CPU.
    return StepsAttend([BlockStep(tiled, documents, step, window) for step in steps])


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
