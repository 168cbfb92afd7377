"""Who sees whom in training: (a, d) attends to depth 0 up to its anchor and to its own chain.

Example: elements (0,0) (1,0) (2,0) (0,1) (1,1) (0,2). (1,1) sees (0,0), (1,0) and itself; (0,2)
sees (0,0), (0,1) and itself: exactly what the slot sees when drafting, where depths are
placeholders behind one verified prefix.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec

BLOCK = 128  # elements of a block of the BlockMask


def visible(elements: Elements, documents: Tensor) -> Tensor:
    """Dense mask (E, E) bool; `documents` (N,) is the document of each token.

    Depth 0 is a triangle a document, a deeper element sees of it what its anchor sees, and a chain
    is a handful of entries a row: nothing of E² is compared, only filled.
    """
    anchor, depth = elements
    context = int((depth == 0).sum())
    head, deeper = anchor[:context], anchor[context:]
    mask = torch.zeros(len(anchor), len(anchor), dtype=torch.bool, device=anchor.device)
    ends = documents[head].unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    for start, end in pairwise([0, *ends]):
        triangle = torch.ones(end - start, end - start, dtype=torch.bool, device=anchor.device)
        mask[start:end, start:end] = triangle.tril_()
    mask[context:, :context] = mask[:context, :context][torch.searchsorted(head, deeper)]
    rows, columns = chains(elements)
    mask[rows, columns] = True
    return mask


def sees(elements: Elements, owner: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether elements q see elements k, indices that are broadcast; `owner` (E,) is the document
    of every element."""
    anchor, depth = elements
    context = (depth[k] == 0) & (anchor[k] <= anchor[q]) & (owner[k] == owner[q])
    return context | ((anchor[k] == anchor[q]) & (depth[k] <= depth[q]))


def chains(elements: Elements) -> tuple[Tensor, Tensor]:
    """(row, column) of every element (a, d) and each (a, d′), 0 < d′ ≤ d: its own chain."""
    anchor, depth = elements
    deepest = int(depth.max())
    place = anchor.new_zeros(deepest + 1, int(anchor.max()) + 1)
    place[depth, anchor] = torch.arange(len(anchor), device=anchor.device)
    row, below = (depth[:, None] > torch.arange(deepest, device=anchor.device)).nonzero().unbind(-1)
    return row, place[below + 1, anchor[row]]


def block_mask(elements: Elements, documents: Tensor) -> BlockMask:
    """The same mask for FlexAttention (CUDA), its blocks found from ranges of anchors and from the
    chains: no E² table is ever made."""
    anchor, depth = elements
    owner = documents[anchor]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(elements, owner, q, k)

    (low, first, shallow), (high, last, deep) = _block_ranges(torch.stack([anchor, owner, depth]))
    near = (low[None] <= high[:, None]) & (first[None] <= last[:, None])
    partial = near & (last[None] >= first[:, None]) & (shallow == 0)[None]
    one = (first == last)[None] & (first == last)[:, None] & (first[None] == first[:, None])
    full = one & (high[None] <= low[:, None]) & (deep == 0)[None]
    rows, columns = chains(elements)
    partial[rows // BLOCK, columns // BLOCK] = True
    partial &= ~full
    # BlockMask.from_kv_blocks would find the last four from the first: that takes longer than the
    # rest of this function.
    lists = (*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T))
    sizes = (len(anchor), len(anchor))
    return BlockMask(sizes, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)


def _block_ranges(values: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of every block of elements: (rows, E) → (rows, blocks), twice."""
    missing = -values.shape[1] % BLOCK
    padded = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
    return padded.unflatten(1, (-1, BLOCK)).aminmax(dim=-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which first) blocks that every row has, as BlockMask wants them."""
    order = blocks.int().contiguous().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


class FlexAttend:
    """Attend under a BlockMask with compiled FlexAttention (CUDA)."""

    def __init__(self, mask: BlockMask, kernel: Callable[..., Tensor] = flex_attention) -> None:
        self.mask, self.kernel = mask, kernel

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = self.kernel(q, k, v, block_mask=self.mask, scale=spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1)
