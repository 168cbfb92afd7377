"""A training run on disk: weights, optimizer moments and progress, so that it resumes exactly.

Random choices are drawn from (seed, step), so no generator state needs keeping. Safetensors only.
Every checkpoint is a new folder, renamed into place when it is whole: whenever the process is
killed, the newest one is good.
"""

import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from peagle.errors import InputError, first_line
from peagle.model.drafter import Drafter
from peagle.train.saved import (
    MOMENTS,
    PROGRESS,
    STATE,
    OtherSettings,
    Progress,
    Saved,
    read_checkpoint,
    read_metrics,
    under,
)
from peagle.train.sharding import part_of, whole

NAME = re.compile("step-[0-9]{8,}")  # of a checkpoint's folder
UNFINISHED = ".making-"  # begins the name of one that is being written


def checkpoints(output: Path) -> list[Path]:
    """Checkpoints of a run, oldest first. Other files and folders beside them are left alone."""
    folder = output / "checkpoints"
    try:
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({first_line(error)})") from error
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


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
    folder = output / "checkpoints" / f"step-{progress.step:08d}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{UNFINISHED}*"):  # of a killed process
        shutil.rmtree(left)
    if folder.exists():  # stopped before it went on from here
        return
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=UNFINISHED))
    try:
        state, plain = made / STATE, made / PROGRESS
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
    """Restore drafter and optimizer in place from the newest checkpoint; nothing is written.

    Raises InputError when there is none or it is damaged, naming the newest one that is not.
    """
    found = checkpoints(output)
    if not found:
        raise InputError(f"--resume: no checkpoint in {output}")
    tensors, progress = _newest(found, drafter)
    weights = under("weights/", tensors)
    own = drafter.state_dict()
    drafter.load_state_dict({name: part_of(weights[name], like) for name, like in own.items()})
    for name, parameter in drafter.named_parameters():
        if f"{MOMENTS[0]}/{name}" in tensors:
            moments = {kind: part_of(tensors[f"{kind}/{name}"], parameter) for kind in MOMENTS}
            step = torch.tensor(float(progress.step), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}
    return progress


def _newest(found: list[Path], drafter: Drafter) -> Saved:
    """The newest checkpoint. Raises InputError that says how to go on when it is damaged."""
    try:
        return read_checkpoint(found[-1], drafter)
    except InputError as error:
        fix = _fix(found, drafter, isinstance(error, OtherSettings))
        raise InputError(f"{error}: {fix}") from error


def _fix(found: list[Path], drafter: Drafter, other: bool) -> str:
    """What to do when the newest checkpoint is damaged, or of `other` settings than now."""
    damaged = [str(found[-1])]
    for folder in reversed(found[:-1]):
        settings = ""
        try:
            read_checkpoint(folder, drafter)
        except OtherSettings:
            if other:
                break
            settings = " with the settings it was started with"
        except InputError:
            damaged.append(str(folder))
            continue
        return f"delete {' and '.join(damaged)} to resume from {folder.name}{settings}"
    if other:
        return "made with other settings: give the settings it was started with"
    return f"no other checkpoint is good: delete {found[-1].parent} and start without --resume"


def append_line(file: Path, record: dict[str, object]) -> None:
    """One JSON line, flushed to the disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")
        out.flush()
        os.fsync(out.fileno())


def forget_after(file: Path, step: int) -> None:
    """Drop lines of steps after `step`, and a half-written last line: they will be done again.
    Raises InputError, and leaves the file as it is, when another line is damaged."""
    kept = read_metrics(file, step)
    if not file.is_file():
        return
    whole = file.with_name(f".{file.name}")
    whole.write_bytes(b"".join(kept))
    os.replace(whole, file)
