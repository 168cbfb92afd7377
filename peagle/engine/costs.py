"""The cost of a forward by its number of rows, measured on the models themselves, and kept in the
user's cache: what one run has learnt, the next one begins with."""

import json
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

import torch

from peagle import __version__
from peagle.backends.base import DrafterModel, TargetModel
from peagle.backends.batch import Batch, Span, blocks_of
from peagle.backends.cpu.library import fingerprint
from peagle.backends.kv_cache import KVCache
from peagle.backends.ranking import ranking
from peagle.files import keep
from peagle.model.base_target import BaseTarget
from peagle.paths import cache_dir, digest

REPEATS = 5  # repetitions of each measurement at the start
HALFWAY = 8  # row count from which points lie closer: products take more rows in steps
BLOCKS = range(4, 33)  # row counts where another row may begin another block of a product
PROMPT_ROWS = 256  # rows of the drafter's forward that is measured for prompts
MEASURED = 0.1  # weight of a new measurement
FAR = 0.8  # power of a correction far from where it was measured
MAX_RATIO = 1.5  # maximum of measured to expected seconds: a first forward may take ten times


class Curve:
    """Seconds by rows: linear between the row counts measured, proportional above the last."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.rows = sorted(seconds)
        self.seconds = [seconds[rows] for rows in self.rows]

    def __call__(self, rows: float) -> float:
        """Seconds of a forward."""
        after = bisect_right(self.rows, rows)
        if not after:
            return self.seconds[0]
        fewer, seconds = self.rows[after - 1], self.seconds[after - 1]
        if after == len(self.rows):
            return seconds * rows / fewer
        step = (self.seconds[after] - seconds) / (self.rows[after] - fewer)
        return seconds + step * (rows - fewer)

    def min_step(self, rows: int) -> float:
        """Seconds of each further row, for as many further ones as make a row cheapest."""
        now = self(rows)
        points = zip(self.rows, self.seconds, strict=True)
        steps = [(seconds - now) / (more - rows) for more, seconds in points if more > rows]
        return min([*steps, self.seconds[-1] / self.rows[-1]])

    def observe(self, passes: Sequence[float], seconds: float) -> float:
        """Move the curve a little towards what some forwards took together: the points between
        which these lie, and all others nearly as far. What slows the machine down slows all of it.
        Its shape changes, too, as with the length of contexts, but slowly: points that no round
        lies at, as without drafts, would else drift away from the others. Returns the factor of
        what lies far."""
        factor = 1 + MEASURED * (min(seconds / sum(map(self, passes)), MAX_RATIO) - 1)
        near = {at for rows in passes for at in self._beside(rows)}
        # A power, not a part of the step: ups and downs that cancel near do so far away, too.
        far = factor**FAR
        for at in range(len(self.seconds)):
            self.seconds[at] *= factor if at in near else far
        return far

    def scale(self, factor: float) -> None:
        """Multiply the whole curve."""
        self.seconds[:] = [factor * seconds for seconds in self.seconds]

    def _beside(self, rows: float) -> tuple[int, int]:
        """The points between which some rows lie, which may be one point twice."""
        last = len(self.rows) - 1
        return max(0, bisect_right(self.rows, rows) - 1), min(last, bisect_left(self.rows, rows))


def verify_curve(target: BaseTarget, model: TargetModel, max_rows: int) -> Curve:
    """Seconds of the target, its output head and the argmax, up to `max_rows` rows."""
    cache = KVCache(blocks_of(max_rows), target.kv_shapes, target.dtype, target.device)

    def run(rows: int) -> None:
        logits = model.logits(model.forward(batch_of(rows), cache, ()).hidden, largest=True)
        ranking(logits).best(logits)[1].tolist()

    return measure(seconds_of(run), row_counts(max_rows))


def draft_curve(model: DrafterModel, max_rows: int) -> Curve:
    """Seconds of one drafter forward, every row of it predicting, up to `max_rows` rows, and of one
    over a prompt, of which no more rows than that predict."""
    drafter = model.drafter
    weight = drafter.norm.weight
    blocks = blocks_of(max(max_rows, PROMPT_ROWS))
    cache = KVCache(blocks, drafter.kv_shapes, weight.dtype, weight.device)

    @torch.no_grad()
    def run(rows: int) -> None:
        features = drafter.project(weight.new_zeros(rows, drafter.config.feature_width))
        out = model.forward(batch_of(rows), features, cache)
        logits = drafter.logits(out.normed[:max_rows])
        ranking(logits).best(logits)[1].tolist()

    return measure(seconds_of(run), row_counts(max_rows, PROMPT_ROWS))


def batch_of(rows: int) -> Batch:
    """The first rows of one request."""
    return Batch.of([Span(range(blocks_of(rows)), 0, [0] * rows)])


def seconds_of(run: Callable[[int], object]) -> Callable[[int], float]:
    """Seconds of a call that ends with its result on the CPU."""

    def seconds(rows: int) -> float:
        started = time.perf_counter()
        run(rows)
        return time.perf_counter() - started

    return seconds


def row_counts(max_rows: int, *also: int) -> list[int]:
    """The row counts of a curve: powers of two up to `max_rows`, halfway points from HALFWAY on, in
    BLOCKS one more, too, and those of `also` above `max_rows`."""
    count, rows = 1, {1, max_rows}
    while count < max_rows:
        rows |= {count, count + 1} if count in BLOCKS else {count}
        count += count if count < HALFWAY else 1 << (count.bit_length() - 2)
    return sorted(rows) + [count for count in also if count > max_rows]


def measure(run: Callable[[int], float], rows: list[int]) -> Curve:
    """A curve over row counts: `run` takes rows and returns seconds. All row counts take turns, so
    that a slow phase of the machine slows all of them."""
    threads = torch.get_num_threads()
    try:
        rounds = [[run(count) for count in rows] for _ in range(REPEATS)]
    finally:  # as in a round of the engine: native code may take threads from torch
        torch.set_num_threads(threads)
    seconds = dict(zip(rows, map(min, *rounds), strict=True))
    # More rows never take less: where they did, what came before was disturbed.
    for fewer, more in zip(rows[-2::-1], rows[:0:-1], strict=True):
        seconds[fewer] = min(seconds[fewer], seconds[more])
    return Curve(seconds)


@dataclass(frozen=True)
class KeptCurve:
    """A measured curve and its file."""

    curve: Curve
    file: Path

    def copy(self) -> Curve:
        """A copy for one engine to correct. When it is no longer used, at the latest when the
        process ends, the file gets what it has become, if that is faster: the next run may find a
        quiet machine."""
        copied = deepcopy(self.curve)
        finalize(copied, _write, self.file, copied.rows, copied.seconds, sum(copied.seconds))
        return copied


def kept_curve(
    rows: list[int], decisive: Sequence[object], device: torch.device, make: Callable[[], Curve]
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
        curve = make()
        _write(file, curve.rows, curve.seconds)
    return KeptCurve(curve, file)


def _device_name(device: torch.device) -> str:
    """The name of a GPU; a processor is part of the native code's fingerprint."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(file: Path, rows: list[int]) -> Curve | None:
    """The curve of a file; None where it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        kept = json.loads(file.read_text())
        seconds = list(kept.values())
        usable = all(isinstance(each, float) and 0 < each < math.inf for each in seconds)
        if usable and list(kept) == list(map(str, rows)):
            return Curve(dict(zip(rows, seconds, strict=True)))
    return None


def _write(file: Path, rows: list[int], seconds: list[float], before: float = math.inf) -> None:
    """Write a curve, if its sum is below that of the file's and the cache can be written."""
    if sum(seconds) < before:
        keep(file, json.dumps(dict(zip(rows, seconds, strict=True))))
