"""Free memory of a device."""

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
