"""Continue a training run from its newest checkpoint, and refuse damaged files.

A checkpoint's checksums are verified once; after that its values are trusted. Every error names the
file. Nothing is taken over from a checkpoint, or written, before all of it has been checked.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from peagle.data.example import Examples, fingerprint
from peagle.errors import InputError, first_line
from peagle.files import replace_file
from peagle.model.drafter import Drafter
from peagle.train import state
from peagle.train.optimizer import Average
from peagle.train.processes import shard_like
from peagle.train.trainer import Trainer


def resume(trainer: Trainer) -> None:
    """Continue from the newest checkpoint of the trainer's output. Raises InputError, with nothing
    changed on disk, when there is none and when what the run saved is damaged."""
    saved = newest_checkpoint(trainer.config.output)
    settings = trainer.progress.settings
    check_settings(saved.progress.settings, settings, trainer.data)
    restore(saved, trainer.drafter, trainer.optimizer, trainer.average)
    trainer.progress = replace(saved.progress, settings=settings)
    start_from_here(trainer)


def start_from_here(trainer: Trainer) -> None:
    """Make the metrics on disk those of a run that begins, or goes on, at the trainer's step."""
    if trainer.accelerator.is_main_process:
        forget_after(trainer.config.output / state.METRICS, trainer.progress.step)


class Saved(NamedTuple):
    """A checkpoint that is as it was written."""

    folder: Path
    tensors: dict[str, Tensor]
    progress: state.Progress


@contextmanager
def _reading() -> Iterator[None]:
    """Raises InputError for a file or folder that cannot be read."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({first_line(error)})") from error


@_reading()
def newest_checkpoint(output: Path) -> Saved:
    """The newest checkpoint of a run. Raises InputError when there is none, and when it is damaged:
    then the fix names the newest one that is not."""
    damaged: dict[Path, str] = {}  # and why
    for folder in reversed(state.checkpoints(output)):
        try:
            saved = read_checkpoint(folder)
        except InputError as error:
            damaged[folder] = error.why
            continue
        if not damaged:
            return saved
        fix = f"delete {' and '.join(map(str, damaged))} to resume from {folder.name}"
        raise InputError(next(iter(damaged.values())), fix=fix)
    if not damaged:
        raise InputError(f"no checkpoint in {output}", field="resume")
    fix = f"no other checkpoint is good: delete {output / 'checkpoints'} and start without `resume`"
    raise InputError(next(iter(damaged.values())), fix=fix)


@_reading()
def read_checkpoint(folder: Path) -> Saved:
    """A checkpoint. Raises InputError when any part of it is damaged."""
    for name in (state.PROGRESS, state.STATE):
        line = state.checksum(folder / name)
        if line.encode() not in (folder / state.SUMS).read_bytes().splitlines():
            raise InputError(f"{folder / name}: damaged (its checksum is not that in {state.SUMS})")
    try:
        progress = state.Progress(**json.loads((folder / state.PROGRESS).read_text()))
    except TypeError as error:
        raise InputError(f"{folder / state.PROGRESS}: of another version ({error})") from error
    tensors = load_file(folder / state.STATE)
    for name, tensor in tensors.items():  # a run may have saved them before its loss was NaN
        if not tensor.isfinite().all():
            raise InputError(f"{folder / state.STATE}: {name} holds values that are not finite")
    return Saved(folder, tensors, progress)


def check_settings(began: dict[str, object], now: dict[str, object], data: Examples) -> None:
    """Raises InputError for the first setting that is not as it was when the run began. Documents
    may have been added after those that it began with, unless some of all are held out: then others
    would be."""
    count = began.get("documents")
    if isinstance(count, int):
        now = now | {"documents": count, "data": fingerprint(islice(data, count))[:16]}
    for name, before in began.items():
        if now.get(name) != before:
            why = f"was {before!r:.40} when the run began"
            added = " (documents may be added with `held_out` only)" if name == "data" else ""
            fix = f"resume as it began{added}, or train into another folder"
            raise InputError(why, field=name, value=now.get(name), fix=fix)


def restore(saved: Saved, drafter: Drafter, optimizer: Optimizer, averaged: Average) -> None:
    """Put a checkpoint's tensors into drafter, optimizer and average. Raises InputError, with
    nothing changed, when the drafter's tensors have other names or shapes."""
    tensors = saved.tensors
    now = state.kept(drafter, averaged)
    for name in sorted(tensors.keys() | now.keys()):
        if name.startswith(state.MOMENTS):  # the first step makes these
            continue
        there, here = (list(t[name].shape) if name in t else "absent" for t in (tensors, now))
        if there != here:
            why = f"{saved.folder / state.STATE}: {name} is {there} there and {here} now"
            raise InputError(why, fix="give the settings that the run was started with")
    for name, tensor in now.items():
        tensor.copy_(shard_like(tensors[name], tensor))
    for name, parameter in drafter.named_parameters():
        if f"{state.MOMENTS[0]}/{name}" in tensors:  # not before the first step
            known = {"step": torch.tensor(float(saved.progress.step), device=parameter.device)}
            for kind in state.MOMENTS:
                known[kind] = shard_like(tensors[f"{kind}/{name}"], parameter)
            optimizer.state[parameter] = known


def forget_after(file: Path, step: int) -> None:
    """Drop lines of steps after `step`, and a half-written last line: they will be done again.
    Raises InputError, and leaves the file as it is, when another line is no record of a step."""
    if not file.exists():
        return
    with _reading():
        *lines, _ = file.read_text(errors="replace").split("\n")
    kept = list[str]()
    for number, line in enumerate(lines, start=1):
        try:
            at = json.loads(line)["step"]
        except (ValueError, RecursionError, TypeError, KeyError):
            at = None
        if type(at) is not int:
            fix = f"remove line {number}, or the whole file"
            raise InputError(f"{file}:{number}: not a record of a step", fix=fix)
        if at <= step:
            kept.append(f"{line}\n")
    replace_file(file, "".join(kept))
