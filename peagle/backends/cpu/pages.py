"""Memory for weights: in large pages, so that few addresses are looked up while they stream by."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

LINE = 64  # bytes of a cache line
CHUNK = 2**26  # bytes
ADVICE = getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL)  # of Linux


class LargePages:
    """Copies tensors side by side, each to the start of a cache line. The memory lives as long as
    any of the copies."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """The same tensor in this memory."""
        size = -(-tensor.nbytes // LINE) * LINE
        if size > len(self._free):
            self._free = _map(max(CHUNK, size))
        copy = self._free[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._free = self._free[size:]
        return copy.copy_(tensor)


def _map(size: int) -> Tensor:
    """`size` bytes of memory, none of it touched yet."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(ADVICE)
    return torch.frombuffer(memory, dtype=torch.uint8)
