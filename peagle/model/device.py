"""Free memory of a device, and memory that a process keeps."""

import ctypes

import psutil
import torch

# Parameters of glibc's mallopt (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD) and their values.
KEPT = {-3: 32 << 20, -1: (1 << 31) - 1, -2: 64 << 20}


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def keep_freed_memory() -> None:
    """Have this process keep up to 2 GiB that it frees for what it allocates next. It would go back
    to the system, and new pages take longer than most of what training does with them. Only glibc
    can do it: elsewhere nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, value in KEPT.items():
            mallopt(name, value)
