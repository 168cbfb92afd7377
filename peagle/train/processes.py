"""Several processes, and trackers besides metrics.jsonl, by accelerate."""

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
