"""A training run on disk: weights, optimizer moments and progress, so that it resumes exactly.

Random choices are drawn from (seed, step), so no generator state needs keeping. Safetensors only.
Every checkpoint is a new folder, renamed into place when it is whole: whenever the process is
killed, the newest one is good.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from peagle.model.drafter import Drafter
from peagle.train.optimizer import Average
from peagle.train.processes import gather

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE, PROGRESS = "state.safetensors", "progress.json"  # of a checkpoint
SUMS = "SHA256SUMS"  # checksums of both, as sha256sum writes them
METRICS = "metrics.jsonl"
NAME = re.compile("step-[0-9]{8,}")  # of a checkpoint's folder


@dataclass(slots=True)
class Progress:
    """Counters of a run, and its settings. No counter is negative."""

    step: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    best_acceptance: float = 0.0  # acceptance length of `best/`, 0 before the first measurement
    stale: int = 0  # measurements since the best one
    acceptance: dict[str, object] = field(default_factory=dict)  # as last measured, see Provenance
    settings: dict[str, object] = field(default_factory=dict)  # that a resumed run must have, too


def checkpoints(output: Path) -> list[Path]:
    """Checkpoints of a run, oldest first; other files and folders are left alone. Raises OSError
    when they cannot be listed."""
    folder = output / "checkpoints"
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def kept(drafter: Drafter, average: Average) -> dict[str, Tensor]:
    """The tensors of a run, by their names in a checkpoint, but for the optimizer's moments."""
    tensors = {f"weights/{name}": tensor for name, tensor in drafter.state_dict().items()}
    return tensors | {f"average/{name}": tensor for name, tensor in average.weights.items()}


def snapshot(drafter: Drafter, optimizer: Optimizer, average: Average) -> dict[str, Tensor]:
    """All tensors of a checkpoint, gathered: they do not depend on the number of processes."""
    tensors = kept(drafter, average)
    for name, parameter in drafter.named_parameters():
        moments = optimizer.state.get(parameter, {})
        tensors |= {f"{kind}/{name}": moments[kind] for kind in MOMENTS if kind in moments}
    return {name: gather(tensor).contiguous() for name, tensor in tensors.items()}


def save_checkpoint(
    output: Path, tensors: dict[str, Tensor], progress: Progress, keep: int
) -> None:
    """Add a checkpoint of a `snapshot` to the run, then remove all but the newest `keep`."""
    folder = output / "checkpoints" / f"step-{progress.step:08d}"
    made = folder.with_name(".making")
    shutil.rmtree(made, ignore_errors=True)  # a killed process leaves it
    if folder.exists():  # stopped before it went on from here
        return
    made.mkdir(parents=True)
    try:
        state = made / STATE
        plain = made / PROGRESS
        save_file(tensors, state)
        plain.write_text(json.dumps(asdict(progress)))
        (made / SUMS).write_text(f"{checksum(plain)}\n{checksum(state)}\n")
        state.chmod(plain.stat().st_mode)  # safetensors lets no other user read
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    for old in checkpoints(output)[:-keep]:
        shutil.rmtree(old)


def checksum(file: Path) -> str:
    """The line of a file in SHA256SUMS."""
    with file.open("rb") as opened:
        return f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}"


def append_line(file: Path, record: dict[str, object]) -> None:
    """One JSON line, flushed to the disk."""
    with file.open("a", buffering=1) as out:  # flushed after the line
        out.write(json.dumps(record) + "\n")
        os.fsync(out.fileno())
