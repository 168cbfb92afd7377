"""A process of training: its rank and its tracker besides metrics.jsonl, by accelerate, and the
memory that it keeps when it frees it.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from peagle.errors import InputError


def make_accelerator(device: torch.device, output: Path, tracker: str | None) -> Accelerator:
    """The rank of this process among those of torchrun or accelerate launch, and its tracker.

    Raises InputError for a tracker that accelerate does not know, or that is not installed.
    """
    try:
        made = Accelerator(cpu=device.type == "cpu", log_with=tracker, project_dir=str(output))
    except ValueError as error:
        why = "is not supported by accelerate"
        raise InputError(why, field="tracker", value=tracker) from error
    if tracker is not None:
        if not made.log_with:  # accelerate leaves out what is not installed
            fix = f"pip install {tracker}"
            raise InputError("is not installed", field="tracker", value=tracker, fix=fix)
        made.init_trackers("tracker")
    return made


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """A number a name, as trackers want them: lists by depth."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            flat |= {f"{name}/{depth}": number for depth, number in enumerate(value)}
        elif name != "step":
            flat[name] = value
    return flat


# glibc's mallopt: what to set, to what.
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2
KEPT = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: (1 << 31) - 1, TOP_PAD: 64 << 20}


def keep_freed_memory() -> None:
    """Have this process keep up to 2 GiB that it frees for what it allocates next. It would go back
    to the system, and new pages take longer than most of what training does with them. Only glibc
    can do it: elsewhere nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, value in KEPT.items():
            mallopt(name, value)
