"""A training run on disk: weights, optimizer moments and the step, so that it resumes exactly.

Random choices are drawn from (seed, step), so no generator state needs keeping. Safetensors only.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import AdamW

from peagle.config import InputError
from peagle.model.checkpoint import replace_folder
from peagle.model.drafter import Drafter

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(folder: Path, drafter: Drafter, optimizer: AdamW, progress: dict[str, float]) -> None:
    """Write `folder` whole or not at all."""
    tensors: dict[str, Tensor] = {f"weights/{k}": v.contiguous() for k, v in drafter.state_dict().items()}
    for name, parameter in drafter.named_parameters():
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{moment}/{name}": state[moment] for moment in MOMENTS if moment in state}
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
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise InputError(f"checkpoint {folder}: cannot be read ({error})") from error
    prefix = "weights/"
    weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"checkpoint {folder}: made with other settings ({error})") from error
    step = tensors[f"{prefix}d2t"].new_tensor(progress["step"]).float()
    for name, parameter in drafter.named_parameters():
        if f"exp_avg/{name}" in tensors:
            moments = {m: tensors[f"{m}/{name}"].to(parameter.device) for m in MOMENTS}
            optimizer.state[parameter] = {"step": step.to(parameter.device).clone(), **moments}
    return progress


def append_line(file: Path, record: dict[str, object]) -> None:
    """One JSON line, flushed to the disk."""
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")
        out.flush()
        os.fsync(out.fileno())
