"""Costs of forwards kept in the user's cache: what one run has learnt, the next one begins with."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import finalize

import torch

from peagle import __version__
from peagle.backends.cpu.library import digest, fingerprint
from peagle.engine.costs import Curve
from peagle.files import keep
from peagle.paths import cache_dir

AnyCurve = TypeVar("AnyCurve", bound=Curve)


@dataclass(frozen=True)
class KeptCurve:
    """A measured curve and its file."""

    curve: Curve
    file: Path

    def correcting(self, copy: AnyCurve) -> AnyCurve:
        """A copy of the curve. When it is no longer used, at the latest when the process ends, the
        file gets what it has become, if that is faster: the next run may find a quiet machine."""
        finalize(copy, _write, self.file, copy.rows, copy.seconds, sum(copy.seconds))
        return copy


def kept_curve(
    rows: list[int], decisive: Sequence[object], device: torch.device, measure: Callable[[], Curve]
) -> KeptCurve:
    """The curve of an earlier run, for row counts `rows`; measured where there is none.

    `decisive`: what, of the model, decides the costs; the machine's part is added here.
    """
    threads = torch.get_num_threads()
    machine = (__version__, torch.__version__, fingerprint(), threads, _device_name(device))
    key = digest(repr((machine, rows, *decisive)).encode())
    file = cache_dir() / "costs" / f"{key}.json"
    curve = _read(file, rows)
    if curve is None:
        curve = measure()
        _write(file, curve.rows, curve.seconds)
    return KeptCurve(curve, file)


def _device_name(device: torch.device) -> str:
    """The name of a GPU; a processor is part of the native code's fingerprint."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(file: Path, rows: list[int]) -> Curve | None:
    """The curve of a file; None where it is missing or damaged."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(kept, dict) or list(kept) != list(map(str, rows)):
        return None
    seconds = list(kept.values())
    if not all(isinstance(each, float) and 0 < each < math.inf for each in seconds):
        return None
    return Curve(dict(zip(rows, seconds, strict=True)))


def _write(file: Path, rows: list[int], seconds: list[float], before: float = math.inf) -> None:
    """Write a curve, if its sum is below that of the file's and the cache can be written."""
    if sum(seconds) < before:
        keep(file, json.dumps(dict(zip(rows, seconds, strict=True))))
