"""Keys and values of running requests, in blocks that the scheduler hands out.

Shapes: T rows, M key/value heads, H and HV head sizes of keys and of values.
"""

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from peagle.backends.batch import BLOCK
from peagle.model.attention import HeadShape


class KVCache:
    """One model's keys and values: of each layer two tensors (blocks + 1, BLOCK, M, H or HV).

    The last block, `padding`, is for rows of padding: their keys are written and never read by
    others. Rejected tokens' slots are overwritten before they are read.
    """

    def __init__(
        self, blocks: int, shapes: Sequence[HeadShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.padding = blocks
        self.device = device
        self._kept = list[Tensor]()  # of all layers of one shape: (layers, blocks + 1, BLOCK, …)
        pairs = dict[int, tuple[Tensor, Tensor]]()
        for shape in dict.fromkeys(shapes):
            alike = [layer for layer, other in enumerate(shapes) if other == shape]
            rows = (len(alike), blocks + 1, BLOCK, shape.heads)
            keys = zeros((*rows, shape.key_size), dtype, device)
            values = zeros((*rows, shape.value_size), dtype, device)
            self._kept += [keys, values]
            pairs |= zip(alike, zip(keys, values, strict=True), strict=True)
        self.layers = [pairs[layer] for layer in range(len(shapes))]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k, v (T, M, ·) of one layer in `slots` (T,); returns all that the layer keeps."""
        keys, values = self.layers[layer]
        keys.flatten(0, 1).index_copy_(0, slots, k)
        values.flatten(0, 1).index_copy_(0, slots, v)
        return keys, values

    def move(self, sources: list[int], slots: list[int]) -> None:
        """Copy what is kept in some slots to others, all at once."""
        at = torch.tensor([sources, slots], device=self.device)
        for kept in self._kept:
            rows = kept.flatten(1, 2)
            rows[:, at[1]] = rows[:, at[0]]


class FeatureCache:
    """The target's features (blocks · BLOCK, F·E) in the blocks that hold the same tokens' keys.

    A drafter may have run fewer slots than its target. A block that is found by its content brings
    the features of the slots that the drafter has not run yet.
    """

    def __init__(self, blocks: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kept = zeros((blocks * BLOCK, width), dtype, device)

    def write(self, slots: Tensor, features: Tensor) -> None:
        """Keep features (T, F·E) in `slots` (T,)."""
        self._kept.index_copy_(0, slots.to(features.device), features)

    def move(self, sources: list[int], slots: list[int]) -> None:
        """Copy what is kept in some slots to others, all at once."""
        self._kept[slots] = self._kept[sources]

    def read(self, slots: Tensor) -> Tensor:
        """Features (T, F·E) of `slots` (T,)."""
        return self._kept[slots.to(self._kept.device)]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU without touching memory, so that only used pages take memory.
    numpy would ask for pages of 2 MB: a first prompt would wait for one in every layer."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = prod(shape)
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
