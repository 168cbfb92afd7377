"""The attention mask of training elements: (a, d) attends to depth 0 up to its anchor, and to its
own chain.

Example: elements (0,0) (1,0) (2,0) (0,1) (1,1) (0,2). (1,1) sees (0,0), (1,0) and itself; (0,2)
sees (0,0), (0,1) and itself: exactly what the slot sees when drafting, where depths are
placeholders after one verified prefix.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec


def visible(elements: Elements, documents: Tensor) -> Tensor:
    """Dense mask (E, E) bool; `documents` (N,) is the document of each token."""
    each = torch.arange(len(elements.anchor), device=elements.anchor.device)
    return sees(elements, documents[elements.anchor], each[:, None], each)


def sees(elements: Elements, owner: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """True where elements q see elements k, indices that are broadcast; `owner` (E,) is each
    element's document."""
    anchor, depth = elements
    context = (depth[k] == 0) & (anchor[k] <= anchor[q]) & (owner[k] == owner[q])
    return context | ((anchor[k] == anchor[q]) & (depth[k] <= depth[q]))


def block_mask(elements: Elements, documents: Tensor) -> BlockMask:
    """The same mask for FlexAttention (CUDA), in blocks; compiled there, so that no table of all
    pairs is made."""
    owner = documents[elements.anchor]
    count = len(elements.anchor)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(elements, owner, q, k)

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
