"""Reading what a training run saved, and refusing what is damaged.

Every error names the file and what is wrong with it. Nothing here writes, and nothing is taken over
from a checkpoint before all of it has been checked.
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import InputError, first_line
from peagle.model.drafter import Drafter

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE, PROGRESS = "state.safetensors", "progress.json"  # of a checkpoint
METRICS = "metrics.jsonl"
UNREADABLE = (OSError, ValueError, RecursionError)  # files and JSON (which may be nested too deep)


@dataclass(slots=True)
class Progress:
    """Where a run stands. No value is negative."""

    step: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    best_acceptance: float = 0.0  # acceptance length of `best/`, 0 before the first measurement
    stale: int = 0  # measurements since the best one


class Saved(NamedTuple):
    """A checkpoint that is whole."""

    tensors: dict[str, Tensor]
    progress: Progress


class OtherSettings(InputError):
    """The checkpoint is of a drafter with other tensors."""


def read_checkpoint(folder: Path, drafter: Drafter) -> Saved:
    """A checkpoint of this drafter's run. Raises InputError when any part of it is damaged, and
    OtherSettings when weights are missing or have other shapes."""
    progress = _read_progress(folder / PROGRESS, step=int(folder.name.rpartition("-")[2]))
    file = folder / STATE
    try:
        tensors = load_file(file)
    except (*UNREADABLE, SafetensorError) as error:
        raise InputError(f"{file}: cannot be read ({first_line(error)})") from error
    if why := _different(tensors, drafter):
        raise OtherSettings(f"{file}: {why}")
    if why := _damage(tensors, drafter, progress.step):
        raise InputError(f"{file}: {why}")
    return Saved(tensors, progress)


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names begin with `prefix`, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _different(tensors: dict[str, Tensor], drafter: Drafter) -> str:
    """How the saved weights differ from the drafter's, by names and shapes; empty when they do
    not."""
    found, own = under("weights/", tensors), drafter.state_dict()
    for name in sorted(own.keys() | found.keys()):
        there, now = (list(side[name].shape) if name in side else "absent" for side in (found, own))
        if there != now:
            return f"{name} is {there} there and {now} now"
    return ""


def _damage(tensors: dict[str, Tensor], drafter: Drafter, step: int) -> str:
    """What is wrong with the values and moments of a checkpoint after `step` steps; empty when
    nothing is."""
    wanted = {f"weights/{name}": tensor for name, tensor in drafter.state_dict().items()}
    if step:
        trained = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        wanted |= {f"{kind}/{name}": p for kind in MOMENTS for name, p in trained}
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is not part of this run"
        if why := _wrong_values(name, tensors[name], wanted[name]):
            return f"{name} {why}"
    return _wrong_vocabulary(tensors["weights/d2t"], drafter.config.transformer.vocab_size)


def _wrong_values(name: str, tensor: Tensor, like: Tensor) -> str:
    found, wanted = ((str(x.dtype), list(x.shape)) for x in (tensor, like))
    if found != wanted:
        return f"is {found[0]} {found[1]}, expected {wanted[0]} {wanted[1]}"
    if not tensor.isfinite().all():
        return "holds values that are not finite"
    if name.startswith("exp_avg_sq/") and (tensor < 0).any():
        return "holds negative values, and is a mean of squares"
    return ""


def _wrong_vocabulary(offsets: Tensor, vocabulary: int) -> str:
    ids = offsets + torch.arange(len(offsets))
    if int(ids.min()) >= 0 and int(ids.max()) < vocabulary:
        return ""
    return f"weights/d2t leads to token ids outside of 0 to {vocabulary - 1}"


def _read_progress(file: Path, step: int) -> Progress:
    try:
        record = json.loads(file.read_text())
        why = _wrong_progress(record, step)
    except UNREADABLE as error:
        raise InputError(f"{file}: cannot be read ({first_line(error)})") from error
    if why:
        raise InputError(f"{file}: {why}")
    return Progress(**record)


def _wrong_progress(record: Any, step: int) -> str:
    """What is wrong with the fields of a `Progress`; empty when nothing is."""
    if not isinstance(record, dict):
        return "expected a JSON object"
    kinds = {field.name: field.type for field in fields(Progress)}
    for name in sorted(kinds.keys() ^ record.keys()):
        return f"{name} is missing" if name in kinds else f"{name!r:.40} is not known"
    for name, kind in kinds.items():
        value = record[name]
        what, types = ("a whole number", [int]) if kind is int else ("a number", [int, float])
        if type(value) not in types or not 0 <= value < math.inf:
            return f"{name} is {value!r:.40}, expected {what} from 0 on"
    if record["step"] != step:
        return f"step is {record['step']}, and the folder is of step {step}"
    return ""


def read_metrics(file: Path, step: int) -> list[bytes]:
    """Whole lines of `metrics.jsonl` up to `step`. A last line that a kill cut short is left out.

    Raises InputError for any other line that is no record of a step.
    """
    if not file.exists():
        return []
    try:
        *lines, _ = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({first_line(error)})") from error
    steps = [_step_of(file, number, line) for number, line in enumerate(lines, start=1)]
    return [line + b"\n" for line, at in zip(lines, steps, strict=True) if at <= step]


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
