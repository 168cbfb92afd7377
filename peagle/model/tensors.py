"""Tensors: rows up to a whole number of tiles, the dtype of sums, and the memory of a device.

torch makes kernels anew for every number of rows, and keeps them for as long as the process lives.
Numbers that recur save their time and memory.
"""

import re
from contextlib import suppress
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 64
CGROUP = Path("/sys/fs/cgroup")  # of a container, by version 2


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
    """Bytes that can still be allocated; of a GPU also those that torch keeps to use them again."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return main_memory()[1]


def main_memory() -> tuple[int, int]:
    """Bytes of main memory, and those that can still be allocated; of a container, where it has
    less than the machine. What is kept of files gives way."""
    total, free, *_ = psutil.virtual_memory()
    with suppress(OSError, ValueError):  # no container, or one with a limit of "max"
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = re.findall(r"active_file (\d+)", (CGROUP / "memory.stat").read_text())
        return min(total, limit), min(free, limit - used + sum(map(int, files)))
    return total, free
