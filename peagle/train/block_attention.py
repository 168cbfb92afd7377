"""Attention over training elements on the CPU, without the scores of elements that never meet.

Shapes: E elements, M key/value heads, G query heads for each, H head size; in a block R elements
and C keys.

By the mask of `train/mask.py` an element sees its document's depth-0 elements up to its anchor, and
its own chain. So elements are taken in the order of their anchors, a block at a time. A block needs
the keys of depth 0 up to its last anchor, and the deeper elements of its own anchors. Example:
elements (0,0) (1,0) (2,0) (3,0) (1,1) (3,1) in blocks of three. The first runs (0,0) (1,0) (1,1)
and reads just these; the second runs (2,0) (3,0) (3,1) and reads these, (0,0) and (1,0). A block's
scores stay in the processor's cache, and are computed again in backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec
from peagle.model.padding import missing_rows, pad_rows
from peagle.train.mask import sees

ROWS = 64  # elements of a block: among the fastest, for documents of 300 to 1,000 tokens


class Block(NamedTuple):
    """Elements of neighbouring anchors, and the keys that they see."""

    rows: Tensor  # (R,)
    keys: Tensor  # (C,), filled up to a whole number of tiles with masked ones
    mask: Tensor  # (R, C) added to scores: 0, or −inf where a key is unseen


class BlockAttend:
    """Attend of elements, sorted by depth, then anchor, over documents (N,). Computes in `dtype`;
    scores and sums over blocks are float32 at least."""

    def __init__(self, elements: Elements, documents: Tensor, dtype: torch.dtype) -> None:
        self.blocks = list(_blocks(elements, documents, _precise(dtype)))
        self.dtype = dtype

    @torch.compiler.disable  # the number of blocks varies: each would have a graph
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert spec.window is None and spec.softcap is None and spec.sinks is None
        q = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        q, k, v = (x.to(self.dtype) for x in (q, k.transpose(0, 1), v.transpose(0, 1)))
        out: Tensor = _Attention.apply(q, k, v, self.blocks, spec.scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def mask_entries(elements: Elements, documents: Tensor) -> int:
    """Upper bound of the entries that the masks of all blocks have together."""
    _, ranges = _ranges(elements, documents)
    first, last, begin, end = ranges.unbind(-1)
    keys = last - first + end - begin
    return sum(ROWS * (count + missing_rows(count)) for count in keys.tolist())


def _ranges(elements: Elements, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Elements in the order of anchor, then depth, (E,); and what each of B blocks reads, (B, 4):
    beginning and end among the depth-0 elements, and in that order, of its anchors' elements."""
    anchor, depth = elements
    order = anchor.argsort(stable=True)
    ordered = anchor[order]
    context = anchor[depth == 0]
    first = ordered[::ROWS].contiguous()
    last = torch.cat([ordered[ROWS - 1 : -1 : ROWS], ordered[-1:]])
    ranges = [
        torch.searchsorted(documents[context], documents[first]),
        torch.searchsorted(context, last, right=True),
        torch.searchsorted(ordered, first),
        torch.searchsorted(ordered, last, right=True),
    ]
    return order, torch.stack(ranges, dim=-1)


def _blocks(elements: Elements, documents: Tensor, dtype: torch.dtype) -> Iterator[Block]:
    owner = documents[elements.anchor]
    order, ranges = _ranges(elements, documents)
    for rows, (first, last, begin, end) in zip(order.split(ROWS), ranges.tolist(), strict=True):
        context = torch.arange(first, last, device=order.device)
        near = order[begin:end]
        keys = torch.cat([context, near[elements.depth[near] > 0]])
        seen = sees(elements, owner, rows[:, None], keys)
        unseen = F.pad(~seen, (0, missing_rows(len(keys))), value=True)
        mask = torch.zeros(unseen.shape, dtype=dtype, device=order.device)
        yield Block(rows, pad_rows(keys), mask.masked_fill_(unseen, float("-inf")))


class _Attention(torch.autograd.Function):
    """q (M, G, E, H), k and v (M, E, H) → (M, G, E, H)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        with torch.autocast(q.device.type, enabled=False), _exact_products(q.dtype):
            for rows, keys, mask in blocks:
                weights = _weights(_rows_of(q, rows), k[:, keys], mask, scale)
                out[:, :, rows] = _by_group(weights.to(v.dtype) @ v[:, keys], rows)
        ctx.save_for_backward(q, k, v)
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=_precise(x.dtype)) for x in (k, v))
        with _exact_products(q.dtype):
            for rows, keys, mask in ctx.blocks:
                queries, grads = (_rows_of(x, rows) for x in (q, grad))
                read = k[:, keys]
                weights = _weights(queries, read, mask, ctx.scale)
                grad_weights = _product(grads, v[:, keys].mT)
                grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
                grad_scores = grad_scores.mul_(ctx.scale).to(q.dtype)
                grad_q[:, :, rows] = _by_group(grad_scores @ read, rows)
                grad_k.index_add_(1, keys, (grad_scores.mT @ queries).to(grad_k.dtype))
                grad_v.index_add_(1, keys, (weights.to(v.dtype).mT @ grads).to(grad_v.dtype))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _weights(queries: Tensor, read: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention weights (M, G·R, C) of queries (M, G·R, H) over keys (M, C, H)."""
    scores = _by_group(_product(queries, read.mT), mask)
    return scores.mul_(scale).add_(mask).softmax(-1).flatten(1, 2)


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (R,) of x (M, G, E, H), group after group: (M, G·R, H)."""
    return x[:, :, rows].flatten(1, 2)


def _by_group(x: Tensor, rows: Tensor) -> Tensor:
    """(M, G·R, …) → (M, G, R, …), for `rows` (R, …)."""
    return x.unflatten(1, (-1, len(rows)))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded to their dtype."""
    dtype = _precise(a.dtype)
    return a.to(dtype) @ b.to(dtype)


@contextmanager
def _exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 copies of bf16 tensors as bf16 inside this block: as exact, and faster. On a
    CPU torch has no product of bf16 tensors with a float32 result."""
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    if dtype == torch.bfloat16:
        setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
