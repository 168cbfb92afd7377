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
    keys: Tensor  # (C,) the last ones, up to a whole number of tiles, unseen
    mask: Tensor  # (R, C) added to scores: 0, or −inf where a key is unseen


class BlockAttend:
    """Attend of elements, sorted by depth, then anchor, over documents (N,). Computes in `dtype`;
    scores, and what is summed over blocks, are float32 at least."""

    def __init__(self, elements: Elements, documents: Tensor, dtype: torch.dtype) -> None:
        self.blocks = list(_blocks(elements, documents, _precise(dtype)))
        self.dtype = dtype

    @torch.compiler.disable  # as many blocks as elements ask for: a graph for each number
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert spec.window is None and spec.softcap is None and spec.sinks is None
        q = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        q, k, v = (x.to(self.dtype) for x in (q, k.transpose(0, 1), v.transpose(0, 1)))
        out: Tensor = _Attention.apply(q, k, v, self.blocks, spec.scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def mask_entries(elements: Elements, documents: Tensor) -> int:
    """Most entries that the masks of all blocks have together."""
    _, first, last, begin, end = _ranges(elements, documents)
    keys = (last - first) + (end - begin)
    return sum(ROWS * (count + missing_rows(count)) for count in keys.tolist())


def _ranges(elements: Elements, documents: Tensor) -> tuple[Tensor, ...]:
    """The elements (E,) by anchor, then depth, and of B blocks, each (B,): first and last of the
    depth-0 elements that it reads, first and last place, in that order, of all elements of its
    anchors. A last one is the one after."""
    anchor, depth = elements
    order = anchor.argsort(stable=True)
    ordered, head = anchor[order], anchor[depth == 0]
    low = ordered[::ROWS].contiguous()
    high = torch.cat([ordered[ROWS - 1 : -1 : ROWS], ordered[-1:]])
    first = torch.searchsorted(documents[head], documents[low])
    last = torch.searchsorted(head, high, right=True)
    begin, end = torch.searchsorted(ordered, low), torch.searchsorted(ordered, high, right=True)
    return order, first, last, begin, end


def _blocks(elements: Elements, documents: Tensor, dtype: torch.dtype) -> Iterator[Block]:
    anchor, depth = elements
    owner = documents[anchor]
    order, *ranges = _ranges(elements, documents)
    bounds = zip(*(each.tolist() for each in ranges), strict=True)
    for rows, (first, last, begin, end) in zip(order.split(ROWS), bounds, strict=True):
        near = order[begin:end]
        keys = torch.cat([torch.arange(first, last, device=order.device), near[depth[near] > 0]])
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
                shares = _shares(_queries(q, rows), k[:, keys], mask, scale)
                out[:, :, rows] = _by_group(shares.to(v.dtype) @ v[:, keys], rows)
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        of_q = torch.empty_like(q)
        of_k, of_v = (torch.zeros_like(x, dtype=_precise(x.dtype)) for x in (k, v))
        with _exact_products(q.dtype):
            for rows, keys, mask in ctx.blocks:
                asked, ours, known = _queries(q, rows), _queries(grad, rows), k[:, keys]
                shares = _shares(asked, known, mask, ctx.scale)
                of_shares = _product(ours, v[:, keys].mT)
                of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
                of_scores = of_scores.mul_(ctx.scale).to(q.dtype)
                of_q[:, :, rows] = _by_group(of_scores @ known, rows)
                of_k.index_add_(1, keys, (of_scores.mT @ asked).to(of_k.dtype))
                of_v.index_add_(1, keys, (shares.to(v.dtype).mT @ ours).to(of_v.dtype))
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None, None


def _shares(asked: Tensor, known: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What each of the queries (M, G·R, H) takes of each of the keys (M, C, H): (M, G·R, C)."""
    scores = _by_group(_product(asked, known.mT), mask)
    return scores.mul_(scale).add_(mask).softmax(-1).flatten(1, 2)


def _queries(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (R,) of x (M, G, E, H), all groups below each other: (M, G·R, H)."""
    return x[:, :, rows].flatten(1, 2)


def _by_group(x: Tensor, rows: Tensor) -> Tensor:
    """(M, G·R, …) → (M, G, R, …), as many as `rows` (R, …)."""
    return x.unflatten(1, (-1, len(rows)))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded to their dtype."""
    dtype = _precise(a.dtype)
    return a.to(dtype) @ b.to(dtype)


@contextmanager
def _exact_products(dtype: torch.dtype) -> Iterator[None]:
    """float32 copies of bf16 tensors are multiplied as bf16 meanwhile: no less exact, and faster.
    torch has no product of bf16 tensors on a CPU whose result is float32."""
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    if dtype == torch.bfloat16:
        setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
