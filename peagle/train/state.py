"""A training run on disk: weights, optimizer moments and the step, so that it resumes exactly.

Random choices are drawn from (seed, step), so no generator state needs keeping. Safetensors only.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

from peagle.config import InputError
from peagle.model.checkpoint import replace_folder
from peagle.model.drafter import Drafter

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    folder: Path, drafter: Drafter, optimizer: AdamW, progress: dict[str, float]
) -> None:
    """Write `folder` whole or not at all."""
    state = drafter.state_dict()
    tensors = {f"weights/{name}": tensor.contiguous() for name, tensor in state.items()}
    for name, parameter in drafter.named_parameters():
        moments = optimizer.state.get(parameter, {})
        tensors |= {f"{kind}/{name}": moments[kind] for kind in MOMENTS if kind in moments}
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".checkpoint-"))
    try:
        save_file(tensors, made / "state.safetensors")
        (made / "progress.json").write_text(json.dumps(progress))
        replace_folder(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def load_checkpoint(folder: Path, drafter: Drafter, optimizer: AdamW) -> dict[str, float]:
    """Restore drafter and optimizer in place; returns the progress."""
    try:
        tensors = load_file(folder / "state.safetensors")
        progress: dict[str, float] = json.loads((folder / "progress.json").read_text())
        step = torch.tensor(float(progress["step"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"checkpoint {folder}: cannot be read ({error})") from error
    prefix = "weights/"
    weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    own = drafter.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        shapes = [list(side[name].shape) if name in side else "absent" for side in (weights, own)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"checkpoint {folder}: made with other settings ({name} is {shapes[0]} there and "
                f"{shapes[1]} now): give the settings it was started with"
            )
    drafter.load_state_dict(weights)
    for name, parameter in drafter.named_parameters():
        if f"exp_avg/{name}" in tensors:
            moments = {m: tensors[f"{m}/{name}"].to(parameter.device) for m in MOMENTS}
            optimizer.state[parameter] = {"step": step.to(parameter.device).clone(), **moments}
    return progress


def append_line(file: Path, record: dict[str, object]) -> None:
    """One JSON line, flushed to the disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")
        out.flush()
        os.fsync(out.fileno())
