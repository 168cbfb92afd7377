"""Going on with a training run: reading what it saved, and refusing what is damaged.

Every error names the file and what is wrong with it. Nothing is taken over from a checkpoint, or
written, before all of it has been checked.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from peagle.data.example import Example, fingerprint
from peagle.errors import InputError, first_line
from peagle.model.drafter import Drafter
from peagle.train.average import Average
from peagle.train.sharding import shard_like
from peagle.train.state import (
    AVERAGE,
    METRICS,
    MOMENTS,
    PROGRESS,
    SETTINGS,
    STATE,
    SUMS,
    UNREADABLE,
    Progress,
    checkpoints,
    checksum,
    replace_file,
)
from peagle.train.trainer import Trainer


def resume(trainer: Trainer) -> None:
    """Continue from the newest checkpoint of the trainer's output. Raises InputError, with nothing
    changed on disk, when there is none and when what the run saved is damaged."""
    output = trainer.config.output
    check_settings(output / SETTINGS, trainer.settings, trainer.data)
    state = trainer.drafter, trainer.optimizer, trainer.average
    trainer.progress = load_checkpoint(output, *state)
    if trainer.accelerator.is_main_process:
        forget_after(output / METRICS, trainer.progress.step)


def start_over(trainer: Trainer) -> None:
    """Drop the metrics of a run that was killed before its first checkpoint. Raises InputError, and
    leaves the file as it is, when it is anything else."""
    if trainer.accelerator.is_main_process:
        forget_after(trainer.config.output / METRICS, 0)


def check_settings(file: Path, now: dict[str, object], data: list[Example]) -> None:
    """Raises InputError that names the first setting in which the run in `file` differs from the
    one that is to continue it. Documents may have been added after those that the run began with. A
    run without that file is not compared."""
    if not file.exists():
        return
    try:
        there = dict(json.loads(file.read_text()))
        now = {**now, "data": fingerprint(data[: there.get("documents")])[:16]}
    except (*UNREADABLE, TypeError) as error:
        why = f"cannot be read ({first_line(error)}): delete it to resume without comparing"
        raise InputError(f"{file}: {why}") from error
    for name, value in now.items():
        if there.get(name) != value:
            why = f"{name} was {there.get(name)!r:.40} when the run began, and is {value!r:.40} now"
            raise InputError(f"{file}: {why}: resume as it began, or train into another folder")


class Saved(NamedTuple):
    """A checkpoint that is whole."""

    tensors: dict[str, Tensor]
    progress: Progress


class OtherSettings(InputError):
    """The checkpoint is of a drafter with other tensors."""


def read_checkpoint(folder: Path, drafter: Drafter) -> Saved:
    """A checkpoint of this drafter's run. Raises InputError when any part of it is damaged, and
    OtherSettings when tensors are missing or have other shapes."""
    try:
        _check_sums(folder)
        progress = Progress(**json.loads((folder / PROGRESS).read_text()))
        tensors = load_file(folder / STATE)
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({first_line(error)})") from error
    except TypeError as error:
        raise InputError(f"{folder / PROGRESS}: of another version ({error})") from error
    if why := _different(tensors, drafter, progress.step):
        raise OtherSettings(f"{folder / STATE}: {why}")
    for name, tensor in tensors.items():  # a run may have saved them before its loss told
        if not tensor.isfinite().all():
            raise InputError(f"{folder / STATE}: {name} holds values that are not finite")
    return Saved(tensors, progress)


def _check_sums(folder: Path) -> None:
    """Raises InputError for a file that is not as it was written."""
    found = {name: checksum(folder / name) for name in (PROGRESS, STATE)}
    recorded = (folder / SUMS).read_bytes().splitlines()
    for name, line in found.items():
        if line.encode() not in recorded:
            raise InputError(f"{folder / name}: damaged (its checksum is not that in {SUMS})")


def _different(tensors: dict[str, Tensor], drafter: Drafter, step: int) -> str:
    """How a checkpoint after `step` steps differs from one of the drafter, by names and shapes;
    empty when it does not."""
    wanted = {f"weights/{name}": tensor for name, tensor in drafter.state_dict().items()}
    if step:
        trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        wanted |= {f"{kind}/{name}": p for kind in (*MOMENTS, AVERAGE) for name, p in trained}
    for name in sorted(wanted.keys() | tensors.keys()):
        there, now = (
            list(side[name].shape) if name in side else "absent" for side in (tensors, wanted)
        )
        if there != now:
            return f"{name} is {there} there and {now} now"
    return ""


def load_checkpoint(
    output: Path, drafter: Drafter, optimizer: Optimizer, averaged: Average
) -> Progress:
    """Restore drafter, optimizer and average in place from the newest checkpoint.

    Raises InputError when there is none or it is damaged, naming the newest one that is not.
    """
    found = checkpoints(output)
    if not found:
        raise InputError(f"resume: no checkpoint in {output}")
    tensors, progress = _newest(found, drafter)
    own = drafter.state_dict()
    weights = {name: shard_like(tensors[f"weights/{name}"], like) for name, like in own.items()}
    drafter.load_state_dict(weights)
    for name, parameter in drafter.named_parameters():
        if f"{MOMENTS[0]}/{name}" in tensors:
            moments = {kind: shard_like(tensors[f"{kind}/{name}"], parameter) for kind in MOMENTS}
            step = torch.tensor(float(progress.step), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}
    for name, average in averaged.weights.items():
        if f"{AVERAGE}/{name}" in tensors:
            average.copy_(shard_like(tensors[f"{AVERAGE}/{name}"], average))
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
    return f"no other checkpoint is good: delete {found[-1].parent} and start without `resume`"


def forget_after(file: Path, step: int) -> None:
    """Drop lines of steps after `step`, and a half-written last line: they will be done again.
    Raises InputError, and leaves the file as it is, when another line is no record of a step."""
    if not file.exists():
        return
    try:
        *lines, _ = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({first_line(error)})") from error
    steps = [_step_of(file, number, line) for number, line in enumerate(lines, start=1)]
    kept = [line + b"\n" for line, at in zip(lines, steps, strict=True) if at <= step]
    replace_file(file, b"".join(kept))


def _step_of(file: Path, number: int, line: bytes) -> int:
    try:
        record = json.loads(line)
    except UNREADABLE:
        record = None
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int:
        why = f"not a record of a step: remove line {number}, or the whole file"
        raise InputError(f"{file}:{number}: {why}")
    return step
