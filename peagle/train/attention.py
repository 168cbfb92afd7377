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

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec
from peagle.model.tensors import missing_rows, pad_rows, precise

ROWS = 64  # elements of a block: among the fastest, for documents of 300 to 1,000 tokens
SCORES = 1 << 22  # scores that exist at once, of as many heads as that allows, at least one

Seen = list[tuple[Tensor, Tensor]]  # keys and values, both (E, M, H), of each step so far


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


def in_tiles(elements: Elements, counts: Sequence[int]) -> tuple[Elements, list[range]]:
    """Elements of each step up to whole tiles (`model/tensors.py`), and each step's. One element
    more fills them; it is deeper than the others, so that only its copies see it."""
    anchor, depth = elements
    more = Elements(torch.cat([anchor, anchor[:1]]), torch.cat([depth, depth[-1:] + 1]))
    steps = torch.arange(len(anchor), device=anchor.device).split(list(counts))
    tiled = [F.pad(step, (0, missing_rows(len(step))), value=-1) for step in steps]
    ends = pairwise([0, *accumulate(map(len, tiled))])
    return Elements(*(x[torch.cat(tiled)] for x in more)), [range(*step) for step in ends]


def block_mask(
    elements: Elements, documents: Tensor, step: range, window: int | None = None
) -> BlockMask:
    """The mask for FlexAttention (CUDA), in blocks: rows are the elements `step`, keys all before
    its end. It is compiled there, so that no table of all pairs is made."""
    owner = documents[elements.anchor]
    rows = torch.arange(step.start, step.stop, device=owner.device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(elements, owner, window, rows[q], k)

    sizes = len(step), step.stop
    return create_block_mask(mask_mod, None, None, *sizes, owner.device, _compile=owner.is_cuda)


class FlexStep(NamedTuple):
    """A step under a BlockMask with compiled FlexAttention (CUDA)."""

    mask: BlockMask
    kernel: Callable[..., Tensor]

    def over(self, q: Tensor, seen: Seen, spec: AttentionSpec) -> Tensor:
        k, v = (torch.cat(parts) for parts in zip(*seen, strict=True))
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


class BlockStep:
    """A step of elements in tiles, sorted by depth, then anchor, over documents (N,). Computes in
    the type of the values; scores and sums over blocks are float32 at least."""

    def __init__(
        self, elements: Elements, documents: Tensor, step: range, window: int | None = None
    ) -> None:
        self.window = window
        self.blocks = list(_blocks(elements, documents, step, window))
        self.longest = max(len(block.keys) for block in self.blocks)

    @torch.compiler.disable  # the number of blocks varies: each would have a graph
    def over(self, q: Tensor, seen: Seen, spec: AttentionSpec) -> Tensor:
        assert spec.window == self.window and spec.softcap is None and spec.sinks is None
        keys, values = ([x.transpose(0, 1) for x in parts] for parts in zip(*seen, strict=True))
        q = q.unflatten(1, (len(keys[0]), -1)).permute(1, 2, 0, 3)
        # In equal parts: torch keeps kernels for every shape.
        allowed = max(1, SCORES // (q.shape[1] * ROWS * self.longest))
        heads = max(n for n in range(1, min(allowed, len(q)) + 1) if len(q) % n == 0)
        # Under autocast norms return float32.
        parts = zip(*(x.to(values[0].dtype).split(heads) for x in (q, *keys, *values)), strict=True)
        out = torch.cat([_Attention.apply(self.blocks, spec.scale, *part) for part in parts])
        return out.permute(2, 0, 1, 3).flatten(1, 2)


class StepsAttend:
    """Attend of a drafter that runs its elements in steps, a forward each; a step sees the keys of
    all before it."""

    def __init__(self, steps: Sequence[FlexStep | BlockStep]) -> None:
        self.steps = steps
        self._seen = defaultdict[int, Seen](list)  # by layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if len(self.steps) == 1:  # it runs again where activations are recomputed
            return self.steps[0].over(q, [(k, v)], spec)
        seen = self._seen[layer]
        seen.append((k.to(v.dtype), v))
        return self.steps[len(seen) - 1].over(q, seen, spec)


def _blocks(
    elements: Elements, documents: Tensor, step: range, window: int | None
) -> Iterator[Block]:
    anchor, depth = elements
    owner = documents[anchor]
    order = anchor[step.start : step.stop].argsort(stable=True)  # by anchor, then depth
    queries = step.start + order
    context = anchor[depth == 0]
    deeper = (depth[: step.stop] > 0).nonzero()[:, 0]
    deeper = deeper[torch.isin(anchor[deeper], anchor[queries])]
    deeper = deeper[anchor[deeper].argsort(stable=True)]
    first, last = (anchor[queries[at::ROWS]].contiguous() for at in (0, ROWS - 1))
    begins = torch.searchsorted(documents[context], documents[first])
    if window is not None:
        begins = begins.maximum(torch.searchsorted(context, first - window + 1))
    ranges = [
        begins,
        torch.searchsorted(context, last, right=True),
        torch.searchsorted(anchor[deeper], first),
        torch.searchsorted(anchor[deeper], last, right=True),
    ]
    bounds = torch.stack(ranges, dim=-1).tolist()
    for rows, (start, stop, begin, end) in zip(order.split(ROWS), bounds, strict=True):
        near = deeper[begin:end]
        keys = torch.cat([torch.arange(start, stop, device=order.device), near])
        seen = sees(elements, owner, window, step.start + rows[:, None], keys)
        shared = int(seen.all(0).cumprod(0).sum())
        mask = torch.where(seen[:, shared:], 0.0, float("-inf"))
        yield Block(rows, (start, stop), near, shared, mask)


class _Attention(torch.autograd.Function):
    """q (M, G, T, H) over the keys and values (M, …, H) of each step → (M, G, T, H)."""

    @staticmethod
    def forward(
        ctx: Any, blocks: list[Block], scale: float, q: Tensor, *keys_and_values: Tensor
    ) -> Tensor:
        k, v = _joined(keys_and_values)
        out = torch.empty_like(q)
        with torch.autocast(q.device.type, enabled=False), _exact_products(q.dtype):
            for block in blocks:
                rows, keys = block.rows, block.keys
                weights = _weights(_rows_of(q, rows), k[:, keys], block, scale)
                out[:, :, rows] = _by_group(weights.to(v.dtype) @ v[:, keys], rows)
        ctx.save_for_backward(q, *keys_and_values)  # not joined: other steps save them, too
        ctx.blocks = blocks
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, *keys_and_values = ctx.saved_tensors  # read once: recomputed activations can be no more
        k, v = _joined(keys_and_values)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=precise(x.dtype)) for x in (k, v))
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
        sizes = [x.shape[1] for x in keys_and_values[: len(keys_and_values) // 2]]
        parts = [part for x in (grad_k, grad_v) for part in x.to(k.dtype).split(sizes, dim=1)]
        return None, None, grad_q, *parts


def _joined(keys_and_values: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Keys (M, E, H) and values of all steps."""
    steps = len(keys_and_values) // 2
    return torch.cat(keys_and_values[:steps], dim=1), torch.cat(keys_and_values[steps:], dim=1)


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


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded to their dtype."""
    dtype = precise(a.dtype)
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
