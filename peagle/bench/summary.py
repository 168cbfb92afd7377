"""What loads took, as a row: medians, percentiles, bootstrap intervals, ratios, differences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from peagle.bench.load import Drafting, Played, Sample

DRAWS = 2000  # of the bootstrap
LISTED = 20  # differences in a row at most


@dataclass(frozen=True, slots=True)
class Cell:
    """What makes a row."""

    method: str
    k: int | str  # draft tokens a round; 0 without, "adaptive": as many as pay
    concurrency: int  # conversations at a time; 0: at random times
    temperature: float

    def __str__(self) -> str:
        load = f"c = {self.concurrency}" if self.concurrency else "random arrival"
        warm = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.method}{f' K = {self.k}' if self.k else ''}, {load}{warm}"


@dataclass(slots=True)
class Result:
    """A cell and its repeats."""

    cell: Cell
    head: str | None = None
    repeats: list[Played] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """Turns that were answered, of all repeats."""
        return [s for played in self.repeats for s in played.samples if s.error is None]

    @property
    def speeds(self) -> list[float]:
        """Output tokens a second, of each repeat."""
        return [sum(s.tokens for s in p.samples) / p.seconds for p in self.repeats]


def row(result: Result, base: Result | None) -> dict[str, Any]:
    """As the JSON file has it; `base` is the target alone under the same load."""
    cell, samples = result.cell, result.samples
    drafting = sum((played.drafting for played in result.repeats), Drafting())
    errors = [error for played in result.repeats for error in played.errors]
    speed = median(result.speeds)
    tpots = [s.tpot for s in samples if s.tpot is not None]
    return {
        "method": cell.method,
        "k": cell.k,
        "head": result.head,
        "concurrency": cell.concurrency,
        "temperature": cell.temperature,
        "repeats": len(result.repeats),
        "requests": len(samples),
        "output_tokens": sum(s.tokens for s in samples),
        "seconds": round(sum(p.seconds for p in result.repeats), 3),
        "output_tps": round(speed, 2),
        "output_tps_95": interval(result, speed),
        **percentiles("ttft", [s.ttft for s in samples]),
        **percentiles("tpot", tpots),
        **drafting.row(),
        **(compared(result, base) if base else {}),
        "errors": len(errors),
        "error": errors[0] if errors else None,
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    """p50 and p99, in milliseconds."""
    found = np.percentile(seconds, [50, 99]) * 1e3 if seconds else (None, None)
    pairs = zip((f"{name}_ms_p50", f"{name}_ms_p99"), found, strict=True)
    return {key: None if value is None else round(float(value), 2) for key, value in pairs}


def interval(result: Result, speed: float) -> list[float] | None:
    """95 % of the throughput when conversations are drawn again (with all their repeats).

    With c at a time, all the time, throughput is c × tokens ÷ their seconds, so that it may be
    drawn again although conversations overlap.
    """
    table = _by_conversation(result)
    return _resampled(np.array(list(table.values())), speed) if len(table) > 1 else None


def compared(result: Result, base: Result) -> dict[str, Any]:
    """Speed beside the target alone, its 95 % interval over the conversations of both; where greedy
    answers differ from its answers, and whether sampled ones might follow another law."""
    if result is base:
        return {"speed_up": 1.0, "speed_up_95": None}
    pairs = zip(result.speeds, base.speeds, strict=False)  # a run may have been cut short
    ratio = median(mine / theirs for mine, theirs in pairs)
    mine, theirs = _by_conversation(result), _by_conversation(base)
    both = [(*mine[key], *theirs[key]) for key in mine if key in theirs]
    found: dict[str, Any] = {"speed_up": round(ratio, 3)}
    found["speed_up_95"] = _resampled(np.array(both), ratio) if len(both) > 1 else None
    sampled = result.cell.temperature > 0
    return found | ({"same_p": two_sample(result, base)} if sampled else same(result, base))


def same(result: Result, base: Result) -> dict[str, Any]:
    """How many turns were answered alike, and the first places of those that were not."""
    expected = {(s.conversation, s.turn): s.said for s in base.samples}
    pairs = [(s, expected[s.conversation, s.turn]) for s in result.samples
             if (s.conversation, s.turn) in expected]  # fmt: skip
    parted = {(s.conversation, s.turn): _parting(s.said, theirs)
              for s, theirs in pairs if s.said != theirs}  # fmt: skip
    listed = [{"conversation": c, "turn": t, "position": at} for (c, t), at in parted.items()]
    alike = sum(s.said == theirs for s, theirs in pairs)
    return {"same": alike, "compared": len(pairs), "differences": listed[:LISTED]}


def two_sample(result: Result, base: Result) -> float | None:
    """Chance that the tokens (of a server: words) of two sets of sampled answers to the same turns
    are counted as differently as they are, were both drawn from one law: a χ² of the counts, beside
    those when answers to the same turn are exchanged at random. None without answers."""
    pairs = list(_paired(result, base))
    if not pairs:
        return None
    words: dict[int | str, int] = {}
    counts = np.zeros((2, len(pairs), sum(len(a) + len(b) for a, b in pairs)))
    for line, pair in enumerate(pairs):
        for side, said in enumerate(pair):
            for word in said:
                counts[side, line, words.setdefault(word, len(words))] += 1
    counts = counts[:, :, : len(words)]
    difference, total = counts[0] - counts[1], counts.sum((0, 1))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(DRAWS, len(pairs)))
    drawn = ((signs @ difference) ** 2 / total).sum(1)
    found = float((difference.sum(0) ** 2 / total).sum())
    return round(float((1 + (drawn >= found - 1e-9).sum()) / (1 + DRAWS)), 4)


def _paired(result: Result, base: Result) -> Iterator[tuple[Sequence[int | str], ...]]:
    """Answers to the same conversation in the same repeat, to its first turn: later ones were asked
    behind different answers."""
    for mine, theirs in zip(result.repeats, base.repeats, strict=False):
        known = {s.conversation: s.said for s in theirs.samples if not s.turn and not s.error}
        for s in mine.samples:
            if not s.turn and s.error is None and s.conversation in known:
                pair = s.said, known[s.conversation]
                yield tuple(x.split() if isinstance(x, str) else x for x in pair)


def _parting(mine: tuple[int, ...] | str, theirs: tuple[int, ...] | str) -> int:
    """Token (or, from a server, character) at which two answers part."""
    length = min(len(mine), len(theirs))
    return next((at for at in range(length) if mine[at] != theirs[at]), length)


def _by_conversation(result: Result) -> dict[int, tuple[float, float]]:
    """(tokens, seconds) of every conversation."""
    found = dict[int, tuple[float, float]]()
    for s in result.samples:
        tokens, seconds = found.get(s.conversation, (0.0, 0.0))
        found[s.conversation] = tokens + s.tokens, seconds + s.seconds
    return found


def _resampled(table: np.ndarray, point: float) -> list[float]:
    """Rows of (tokens, seconds), or of two such pairs for a ratio; scaled to a point estimate."""
    draws = np.random.default_rng(0).integers(len(table), size=(DRAWS, len(table)))

    def value(sums: np.ndarray) -> np.ndarray:
        speed = sums[..., 0] / sums[..., 1]
        return speed / (sums[..., 2] / sums[..., 3]) if sums.shape[-1] == 4 else speed

    spread = np.quantile(value(table[draws].sum(1)), [0.025, 0.975]) / value(table.sum(0))
    return [round(float(edge) * point, 3) for edge in spread]
