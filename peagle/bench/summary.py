"""Measured turns, and the rows of a report: medians, percentiles, bootstrap intervals, ratios."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from peagle.engine.drafting import Drafting
from peagle.engine.request import Stats

DRAWS = 2000  # of the bootstrap
MAX_EXCESS = 1.1  # of a speed-up over the tokens a target forward; more is not the drafter's


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured turn."""

    conversation: int
    turn: int
    seconds: float  # from the question to the last token
    ttft: float = 0.0  # seconds to the first token
    tokens: int = 0
    output: tuple[int, ...] = ()
    text: str = ""
    error: str | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Its conversation and turn."""
        return self.conversation, self.turn

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.tokens < 2:
            return None
        return (self.seconds - self.ttft) / (self.tokens - 1)


class Played(NamedTuple):
    """A load that was played."""

    samples: list[Sample]
    seconds: float  # from the first question to the last token
    drafting: Stats

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all conversations."""
        return sum(sample.tokens for sample in self.samples) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error is not None]


def joined(plays: list[Played]) -> Played:
    """Several plays as one, whose speed is all their tokens over all their seconds."""
    samples = [sample for played in plays for sample in played.samples]
    drafting = sum((played.drafting for played in plays), Stats())
    return Played(samples, sum(played.seconds for played in plays), drafting)


@dataclass(frozen=True, slots=True)
class Cell:
    """The settings of one row."""

    drafting: Drafting
    concurrency: int  # conversations at a time
    temperature: float

    @property
    def row(self) -> dict[str, Any]:
        """Its part of a row in a result file."""
        load = {"concurrency": self.concurrency, "temperature": self.temperature}
        return self.drafting.row | load

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Cell":
        """The inverse of `row`."""
        return cls(Drafting.from_row(row), row["concurrency"], row["temperature"])

    @property
    def load(self) -> str:
        """Load and temperature, in words."""
        load = f"c = {self.concurrency}"
        return f"{load}, t = {self.temperature:g}" if self.temperature else load

    def __str__(self) -> str:
        return f"{self.drafting.method} {self.drafting}, {self.load}"


@dataclass(slots=True)
class Result:
    """A cell and its repeats."""

    cell: Cell
    head: str | None = None
    repeats: list[Played] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """Turns that were answered, of all repeats."""
        return [each for played in self.repeats for each in played.samples if each.error is None]

    @property
    def speeds(self) -> list[float]:
        """Output tokens per second of each repeat."""
        return [played.tokens_per_second for played in self.repeats]


def row(result: Result, base: Result | None) -> dict[str, Any]:
    """The row as the JSON files have it; `base` is the target alone under the same load."""
    samples = result.samples
    whole = joined(result.repeats)
    speed = median(result.speeds)
    return {
        **result.cell.row,
        "head": result.head,
        "repeats": len(result.repeats),
        "requests": len(samples),
        "output_tokens": sum(sample.tokens for sample in samples),
        "seconds": round(whole.seconds, 3),
        "output_tps": round(speed, 2),
        "output_tps_95": interval(speed, result),
        **percentiles("ttft", [s.ttft for s in samples]),
        **percentiles("tpot", [s.tpot for s in samples if s.tpot is not None]),
        **acceptance_row(whole.drafting),
        **({} if whole.drafting.rounds else {"acceptance_length": None}),
        **(compared(result, base) if base else {}),
        "errors": len(whole.errors),
        "error": next(iter(whole.errors), None),
    }


def doubt(row: dict[str, Any]) -> str | None:
    """The reason why a row's speed-up cannot be right, and the fix; None: it may be.

    A forward takes at least the time of one without drafts, so the tokens a target forward limit
    the speed-up. It is beyond them where something else slowed the target alone.
    """
    tokens = row.get("tokens_per_forward")
    if not tokens or row.get("speed_up", 0) <= MAX_EXCESS * tokens:
        return None
    reading = f"{row['speed_up']:.2f} × is impossible with {tokens:.2f} tokens a target forward"
    return f"{Cell.from_row(row)}: {reading}: the machine was busy; run it again, alone"


def acceptance_row(stats: Stats) -> dict[str, Any]:
    """Drafting statistics as the JSON files have them; None where no round decoded."""
    shares = stats.accepted_per_position
    counted = stats.forwards > 0
    return {
        "acceptance_length": round(stats.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in shares],
        "nodes": round(stats.nodes_per_round, 2) if stats.drafted else None,
        "rows_per_round": round(stats.rows_per_round, 2) if counted else None,
        "tokens_per_forward": round(stats.tokens_per_forward, 4) if counted else None,
        "accepted_from_lookup": stats.accepted_from_lookup if counted else None,
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    """p50 and p99 in milliseconds; None without values."""
    if not seconds:
        return {f"{name}_ms_p50": None, f"{name}_ms_p99": None}
    half, p99 = np.percentile(seconds, [50, 99]) * 1000
    return {f"{name}_ms_p50": round(float(half), 2), f"{name}_ms_p99": round(float(p99), 2)}


def compared(result: Result, base: Result) -> dict[str, Any]:
    """Speed-up over the target alone with its 95 % interval; how many greedy answers equal its
    answers. Repeats without an answer do not count; nothing is compared where no other is left."""
    pairs = zip(result.speeds, base.speeds, strict=False)  # a run may have been cut short
    ratios = [speed / base_speed for speed, base_speed in pairs if speed and base_speed]
    if not ratios:
        return {}
    if result is base:
        return {"speed_up": 1.0, "speed_up_95": None}
    ratio = median(ratios)
    found = {"speed_up": round(ratio, 3), "speed_up_95": interval(ratio, result, base)}
    return found if result.cell.temperature else found | same(result, base)


def interval(point: float, *results: Result) -> list[float] | None:
    """95 % interval of a throughput, or of the ratio of two, around its point estimate, by drawing
    conversations with all their repeats. None for a single conversation.

    With c requests running at all times, throughput is c × tokens ÷ their seconds, so that
    conversations may be drawn though they overlap.
    """
    totals = [_by_conversation(result) for result in results]
    shared = sorted(set(totals[0]).intersection(*totals))
    if (count := len(shared)) < 2:
        return None
    # (1 or 2, conversations, 2)
    table = np.array([[total[each] for each in shared] for total in totals])
    draws = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    drawn = _ratio(table[:, draws].sum(2))
    spread = np.quantile(drawn, [0.025, 0.975]) / _ratio(table.sum(1))
    return [round(float(edge) * point, 3) for edge in spread]


def _ratio(sums: np.ndarray) -> np.ndarray:
    """Throughput of (tokens, seconds) sums (1, …, 2); of two such, the first over the second."""
    speeds = sums[..., 0] / sums[..., 1]
    return speeds[0] / speeds[1] if len(speeds) > 1 else speeds[0]


def _by_conversation(result: Result) -> dict[int, np.ndarray]:
    """(tokens, seconds) of every conversation."""
    totals = dict[int, np.ndarray]()
    for sample in result.samples:
        total = totals.get(sample.conversation, 0)
        totals[sample.conversation] = total + np.array([sample.tokens, sample.seconds])
    return totals


def same(result: Result, base: Result) -> dict[str, Any]:
    """Count turns with the same answer."""
    expected = {sample.key: sample.output for sample in base.samples}
    shared = [sample for sample in result.samples if sample.key in expected]
    alike = sum(sample.output == expected[sample.key] for sample in shared)
    return {"same": alike, "compared": len(shared)}
