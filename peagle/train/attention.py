"""Attention over training elements: (a, d) attends to depth 0 up to its anchor, and to its own
chain.

Shapes: E elements, M key/value heads, G query heads for each, H head size; in a block R elements
and C keys.

Example of the mask: elements (0,0) (1,0) (2,0) (0,1) (1,1) (0,2). (1,1) sees (0,0), (1,0) and
itself; (0,2) sees (0,0), (0,1) and itself: exactly what the slot sees when drafting, where depths
are placeholders after one verified prefix.

On CUDA FlexAttention runs by that mask. On a CPU elements are taken in the order of their anchors,
a block at a time, so that no scores are computed of elements that never meet. A block needs the
keys of depth 0 up to its last anchor, and the deeper elements of its own anchors. Example:
elements (0,0) (1,0) (2,0) (3,0) (1,1) (3,1) in blocks of three. The first runs (0,0) (1,0) (1,1)
and reads just these; the second runs (2,0) (3,0) (3,1) and reads these, (0,0) and (1,0). A block's
scores stay in the processor's cache, and are computed again in backward. All its elements see the
keys of earlier anchors, so a mask is kept for the others only: memory is linear in elements.

Where a head has a window of W, an element sees no key W or more positions before it, as slots do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec
from peagle.model.tensors import pad_rows

ROWS = 64  # elements of a block: among the fastest, for documents of 300 to 1,000 tokens
SCORES = 1 << 22  # scores that exist at once, of as many heads as that allows, at least one


def visible(elements: Elements, documents: Tensor, window: int | None = None) -> Tensor:
    """Dense mask (E, E) bool; `documents` (N,) is the document of each token."""
    each = torch.arange(len(elements.anchor), device=elements.anchor.device)
    return sees(elements, documents[elements.anchor], window, each[:, None], each)


def sees(elements: Elements, owner: Tensor, window: int | None, q: Tensor, k: Tensor) -> Tensor:
    """True where elements q see elements k, indices that are broadcast; `owner` (E,) is each
    element's document."""
    anchor, depth = elements
    context = (depth[k] == 0) & (anchor[k] <= anchor[q]) & (owner[k] == owner[q])
    seen = context | ((anchor[k] == anchor[q]) & (depth[k] <= depth[q]))
    if window is None:
        return seen
    place = anchor + depth
    return seen & (place[q] - place[k] < window)


def block_mask(elements: Elements, documents: Tensor, window: int | None = None) -> BlockMask:
    """The same mask for FlexAttention (CUDA), in blocks; compiled there, so that no table of all
    pairs is made."""
    owner = documents[elements.anchor]
    count = len(elements.anchor)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(elements, owner, window, q, k)

    device = elements.anchor.device
    on_gpu = device.type == "cuda"
    return create_block_mask(mask_mod, None, None, count, count, device, _compile=on_gpu)


class FlexAttend:
    """Attend under a BlockMask with compiled FlexAttention (CUDA)."""

    def __init__(self, mask: BlockMask, kernel: Callable[..., Tensor] = flex_attention) -> None:
        self.mask = mask
        self.kernel = kernel

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        # Under autocast norms return float32, and the kernel needs one dtype.
        q, k, v = (x.to(v.dtype).transpose(0, 1)[None] for x in (q, k, v))
        out = self.kernel(q, k, v, block_mask=self.mask, scale=spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1)


class Block(NamedTuple):
    """Elements of neighbouring anchors, and the keys that they see."""

    rows: Tensor  # (R,)
    context: tuple[int, int]  # first depth-0 element that is seen, and the one after the last
    near: Tensor  # deeper elements that are seen
    shared: int  # keys at the begin that all rows see
    mask: Tensor  # (R, …) added to the scores of the keys after these: 0, or −inf for unseen ones

    @property
    def keys(self) -> Tensor:
        """(C,), filled up to a whole number of tiles."""
        context = torch.arange(*self.context, device=self.near.device)
        return pad_rows(torch.cat([context, self.near]))


class BlockAttend:
    """Attend of elements, sorted by depth, then anchor, over documents (N,). Computes in `dtype`;
    scores and sums over blocks are float32 at least."""

    def __init__(
        self, elements: Elements, documents: Tensor, dtype: torch.dtype, window: int | None = None
    ) -> None:
        self.window = window
        self.blocks = list(_blocks(elements, documents, _precise(dtype), window))
        self.longest = max(len(block.keys) for block in self.blocks)
        self.dtype = dtype

    @torch.compiler.disable  # the number of blocks varies: each would have a graph
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert spec.window == self.window and spec.softcap is None and spec.sinks is None
        q = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        q, k, v = (x.to(self.dtype) for x in (q, k.transpose(0, 1), v.transpose(0, 1)))
        heads = max(1, SCORES // (q.shape[1] * ROWS * self.longest))
        parts = zip(*(x.split(heads) for x in (q, k, v)), strict=True)
        out = torch.cat([_Attention.apply(*part, self.blocks, spec.scale) for part in parts])
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def _blocks(
    elements: Elements, documents: Tensor, dtype: torch.dtype, window: int | None
) -> Iterator[Block]:
    anchor, depth = elements
    owner = documents[anchor]
    order = anchor.argsort(stable=True)  # by anchor, then depth
    ordered = anchor[order]
    context = anchor[depth == 0]
    first = ordered[::ROWS].contiguous()
    last = torch.cat([ordered[ROWS - 1 : -1 : ROWS], ordered[-1:]])
    begins = torch.searchsorted(documents[context], documents[first])
    if window is not None:
        begins = begins.maximum(torch.searchsorted(context, first - window + 1))
    ranges = [
        begins,
        torch.searchsorted(context, last, right=True),
        torch.searchsorted(ordered, first),
        torch.searchsorted(ordered, last, right=True),
    ]
    each = torch.stack(ranges, dim=-1).tolist()
    for rows, (start, stop, begin, end) in zip(order.split(ROWS), each, strict=True):
        near = order[begin:end]
        near = near[depth[near] > 0]
        keys = torch.cat([torch.arange(start, stop, device=order.device), near])
        seen = sees(elements, owner, window, rows[:, None], keys)
        shared = int(seen.all(0).cumprod(0).sum())
        unseen = ~seen[:, shared:]
        mask = torch.zeros(unseen.shape, dtype=dtype, device=order.device)
        mask.masked_fill_(unseen, float("-inf"))
        yield Block(rows, (start, stop), near, shared, mask)


class _Attention(torch.autograd.Function):
    """q (M, G, E, H), k and v (M, E, H) → (M, G, E, H)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        with torch.autocast(q.device.type, enabled=False), _exact_products(q.dtype):
            for block in blocks:
                rows, keys = block.rows, block.keys
                weights = _weights(_rows_of(q, rows), k[:, keys], block, scale)
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
            for block in ctx.blocks:
                rows, keys = block.rows, block.keys
                queries, grads = (_rows_of(x, rows) for x in (q, grad))
                read = k[:, keys]
                weights = _weights(queries, read, block, ctx.scale)
                grad_weights = _product(grads, v[:, keys].mT)
                grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
                grad_scores = grad_scores.mul_(ctx.scale).to(q.dtype)
                grad_q[:, :, rows] = _by_group(grad_scores @ read, rows)
                grad_k.index_add_(1, keys, (grad_scores.mT @ queries).to(grad_k.dtype))
                grad_v.index_add_(1, keys, (weights.to(v.dtype).mT @ grads).to(grad_v.dtype))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _weights(queries: Tensor, read: Tensor, block: Block, scale: float) -> Tensor:
    """Attention weights (M, G·R, C) of queries (M, G·R, H) over keys (M, C, H)."""
    scores = _by_group(_product(queries, read.mT), block.rows).mul_(scale)
    masked, fillers = scores[..., block.shared :].tensor_split([block.mask.shape[1]], dim=-1)
    masked.add_(block.mask)
    fillers.fill_(float("-inf"))
    return scores.softmax(-1).flatten(1, 2)


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
