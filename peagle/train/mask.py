"""Who sees whom in training: (a, d) attends to depth 0 up to its anchor and to its own chain.

Example: elements (0,0) (1,0) (2,0) (0,1) (1,1) (0,2). (1,1) sees (0,0), (1,0) and itself; (0,2)
sees (0,0), (0,1) and itself: exactly what the slot sees when drafting, where depths are
placeholders behind one verified prefix.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from peagle.model.attend import AttentionSpec, attention
from peagle.train.cod import Elements


def visible(queries: Elements, keys: Elements, documents: Tensor) -> Tensor:
    """Dense mask (E_q, E_k) bool; `documents` (N,) is the document of each token."""
    qa, qd = queries.anchor[:, None], queries.depth[:, None]
    ka, kd = keys.anchor[None], keys.depth[None]
    context = (kd == 0) & (ka <= qa) & (documents[ka] == documents[qa])
    return context | ((ka == qa) & (kd <= qd))


def block_mask(elements: Elements, documents: Tensor) -> BlockMask:
    """The same mask for FlexAttention (CUDA)."""
    anchor, depth = elements
    owner = documents[anchor]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        context = (depth[k] == 0) & (anchor[k] <= anchor[q]) & (owner[k] == owner[q])
        return context | ((anchor[k] == anchor[q]) & (depth[k] <= depth[q]))

    size = len(anchor)
    return create_block_mask(mask_mod, None, None, size, size, device=anchor.device)


class DenseAttend:
    """Attend under a dense mask (CPU: FlexAttention has no backward there).

    Keys and values of earlier calls for the same layer are kept in front: EAGLE-3's training-time
    test calls the drafter once a depth, with the next rows of the mask.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask  # (E, E)
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        first = 0
        if layer in self._seen:
            first = len(self._seen[layer][0])
            k, v = (torch.cat(pair) for pair in zip(self._seen[layer], (k, v), strict=True))
        self._seen[layer] = k, v
        return attention(q, k, v, self.mask[first : first + len(q), : len(k)], spec)


class FlexAttend:
    """Attend under a BlockMask with compiled FlexAttention (CUDA)."""

    def __init__(self, mask: BlockMask, kernel: Callable[..., Tensor] = flex_attention) -> None:
        self.mask, self.kernel = mask, kernel

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = self.kernel(q, k, v, block_mask=self.mask, scale=spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1)
