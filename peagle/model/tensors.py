"""Tensors: rows up to a whole number of tiles, the dtype of sums, and what a device has left.

torch makes kernels anew for every number of rows, and keeps them for as long as the process lives.
Numbers that recur save their time and memory.
"""

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 64


def missing_rows(rows: int) -> int:
    """Rows up to the next whole number of tiles; tiles are larger for many rows, at most a 16th."""
    return -rows % max(ROW_TILE, 1 << max(0, rows.bit_length() - 5))


def pad_rows(rows: Tensor) -> Tensor:
    """Rows (R, …), and rows of zeros that fill the last tile."""
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing_rows(len(rows))))


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of numbers of a `dtype`: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
