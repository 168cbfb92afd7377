"""A training run on disk: weights, optimizer moments and progress, so that it resumes exactly.

Random choices are drawn from (seed, step), so no generator state needs keeping. Safetensors only.
Every checkpoint is a new folder, renamed into place when it is whole: whenever the process is
killed, the newest one is good.
"""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from peagle.config import InputError
from peagle.model.drafter import Drafter
from peagle.train.sharding import part_of, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIX = "step-"


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    best_acceptance: float = 0.0  # acceptance length of `best/`, 0 before the first measurement
    stale: int = 0  # measurements since the best one


def checkpoints(output: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted((output / "checkpoints").glob(f"{PREFIX}*"))


def snapshot(drafter: Drafter, optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds, whole: how many processes train does not show in it."""
    tensors = {f"weights/{name}": whole(t).contiguous() for name, t in drafter.state_dict().items()}
    for name, parameter in drafter.named_parameters():
        moments = optimizer.state.get(parameter, {})
        tensors |= {f"{kind}/{name}": whole(moments[kind]) for kind in MOMENTS if kind in moments}
    return tensors


def save_checkpoint(
    output: Path, tensors: dict[str, Tensor], progress: Progress, keep: int
) -> None:
    """Add a checkpoint of a `snapshot` to the run, then remove all but the newest `keep`."""
    folder = output / "checkpoints" / f"{PREFIX}{progress.step:08d}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():  # stopped before it went on from here
        return
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        state, plain = made / "state.safetensors", made / "progress.json"
        save_file(tensors, state)
        plain.write_text(json.dumps(asdict(progress)))
        state.chmod(plain.stat().st_mode)  # safetensors and mkdtemp let nobody else read
        made.chmod(folder.parent.stat().st_mode)
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    for old in checkpoints(output)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(output: Path, drafter: Drafter, optimizer: Optimizer) -> Progress:
    """Restore drafter and optimizer in place from the newest checkpoint."""
    found = checkpoints(output)
    if not found:
        raise InputError(f"--resume: no checkpoint in {output}")
    folder = found[-1]
    try:
        tensors = load_file(folder / "state.safetensors")
        progress = Progress(**json.loads((folder / "progress.json").read_text()))
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise InputError(
            f"checkpoint {folder}: cannot be read ({error}): delete it to resume from an older one"
        ) from error
    weights, own = _under("weights/", tensors), drafter.state_dict()
    _check_same(folder, weights, own)
    drafter.load_state_dict({name: part_of(weights[name], like) for name, like in own.items()})
    moments = {kind: _under(f"{kind}/", tensors) for kind in MOMENTS}
    for name, parameter in drafter.named_parameters():
        if name in moments[MOMENTS[0]]:
            state = {kind: part_of(moments[kind][name], parameter) for kind in MOMENTS}
            step = torch.tensor(float(progress.step), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **state}
    for left in (output / "checkpoints").glob(".making-*"):  # of a killed process
        shutil.rmtree(left)
    return progress


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _check_same(folder: Path, found: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    for name in sorted(own.keys() | found.keys()):
        there, now = (list(side[name].shape) if name in side else "absent" for side in (found, own))
        if there != now:
            raise InputError(
                f"checkpoint {folder}: made with other settings ({name} is {there} there and "
                f"{now} now): give the settings it was started with"
            )


def append_line(file: Path, record: dict[str, object]) -> None:
    """One JSON line, flushed to the disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")
        out.flush()
        os.fsync(out.fileno())


def forget_after(file: Path, step: int) -> None:
    """Drop lines of steps after `step`, and a half-written last line: they will be done again."""
    if not file.is_file():
        return
    lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    whole = file.with_name(f".{file.name}")
    whole.write_text("".join(kept))
    os.replace(whole, file)
