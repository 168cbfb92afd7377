"""What a forward costs by its number of rows, measured on the models themselves."""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from peagle.backends.base import DrafterModel, TargetModel
from peagle.backends.batch import Batch, Span, blocks_of
from peagle.backends.kv_cache import KVCache
from peagle.engine.budget import PROMPT_ROWS, Curve
from peagle.model.base_target import BaseTarget

REPEATS = 5  # of each measurement at the start
SLOW = 8.0  # ratio of a slow forward's seconds to those measured at the start
MAX_SLOW_SECONDS = 10.0  # of slow forwards in a row, before a warning

log = logging.getLogger(__name__)


class WatchedCurve(Curve):
    """A copy of a measured curve, which warns once when forwards become far slower than it was."""

    def __init__(self, measured: Curve) -> None:
        super().__init__(dict(zip(measured.rows, measured.seconds, strict=True)))
        self.measured = measured
        self._slow_seconds = 0.0
        self._warned = False

    def observe(self, passes: Sequence[float], seconds: float) -> None:
        """See `Curve.observe`."""
        super().observe(passes, seconds)
        ratio = seconds / sum(map(self.measured, passes))
        self._slow_seconds = self._slow_seconds + seconds if ratio > SLOW else 0.0
        if self._slow_seconds > MAX_SLOW_SECONDS and not self._warned:
            self._warned = True
            log.warning(
                "forwards take %.0f times as long as at the start: other processes seem to use "
                "this device; on a CPU, OMP_NUM_THREADS=1 leaves them room",
                ratio,
            )


def verify_curve(target: BaseTarget, model: TargetModel, most: int) -> Curve:
    """Seconds of the target and its output head, up to `most` rows."""
    cache = KVCache(blocks_of(most), target.kv_shapes, target.dtype, target.device)

    def run(rows: int) -> None:
        out = model.forward(batch_of(rows), cache, ())
        model.logits(out.hidden).max(-1).indices.tolist()

    return measure(seconds_of(run), most)


def draft_curve(model: DrafterModel, most: int) -> Curve:
    """Seconds of one drafter forward, every row of it predicting, up to `most` rows, and of one
    over a prompt, of which no more rows than that predict."""
    drafter = model.drafter
    weight = drafter.norm.weight
    blocks = blocks_of(max(most, PROMPT_ROWS))
    cache = KVCache(blocks, drafter.kv_shapes, weight.dtype, weight.device)

    @torch.no_grad()
    def run(rows: int) -> None:
        features = drafter.project(weight.new_zeros(rows, drafter.config.feature_width))
        out = model.forward(batch_of(rows), features, cache)
        drafter.logits(out.normed[:most]).max(-1).indices.tolist()

    return measure(seconds_of(run), most, PROMPT_ROWS)


def batch_of(rows: int) -> Batch:
    """The first rows of one request."""
    return Batch.of([Span(range(blocks_of(rows)), 0, [0] * rows)])


def seconds_of(run: Callable[[int], None]) -> Callable[[int], float]:
    """Seconds of a call that ends with its result on the CPU."""

    def seconds(rows: int) -> float:
        started = time.perf_counter()
        run(rows)
        return time.perf_counter() - started

    return seconds


def measure(run: Callable[[int], float], most: int, *also: int) -> Curve:
    """A curve up to `most` rows, and also at more: `run` takes rows and returns seconds. All row
    counts take turns, so that what slows the machine down for a while slows all of them."""
    rows = [1]
    while rows[-1] < most:
        rows.append(min(2 * rows[-1], most))
    rows += [count for count in also if count > most]
    rounds = [[run(count) for count in rows] for _ in range(REPEATS)]
    seconds = dict(zip(rows, map(min, *rounds), strict=True))
    # More rows never take less: where they did, what came before was disturbed.
    for fewer, more in zip(rows[-2::-1], rows[:0:-1], strict=True):
        seconds[fewer] = min(seconds[fewer], seconds[more])
    return Curve(seconds)
