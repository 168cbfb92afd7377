"""What to draft and what to verify: what pays, at the load of the moment. No torch here.

One rule, twice: (requests + Σ chances of the nodes verified) / time of the round, as large as it
can be. *Before drafting*, the nodes are those that drafts usually have, and the time includes
drafting. *After drafting*, they are those of all requests' drafts: the likeliest are verified, as
many as are worth their rows. A request may get no node at all. So speculation fades out as the
machine fills up, from the least likely nodes on.

Before a drafter can draft for a request, it must run the slots that it has missed, such as a
prompt. That pays if drafting saves well more on the tokens that the request has left. A drafter's
forward that pays for many requests may not pay for a few of them.

Shapes: K depths, C classes of chance.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from peagle.engine.tree import Draft

REPEATS = 5  # of each measurement at the start
MEASURED = 0.1  # weight of a new measurement
MAX_RATIO = 2.0  # of a measurement to what was expected: a first forward may take ten times as long
MIN_GAIN = 1.04  # what drafting must promise, over decoding without: estimates are not exact
MAX_LEFT = 512  # tokens that a request is expected to have left, at most
MIN_SAVED = 2.0  # times what its missed slots cost: a request may end early
PROMPT_ROWS = 256  # of the drafter's forward that is measured for prompts
PROBE_NODES = 3  # that are verified though they do not pay
PROBE_SHARE = (
    0.005  # of the time, at most, goes to these nodes, and as much to drafts that do not pay
)
PRIOR_WEIGHT = 8.0  # expected tokens that a depth's calibration begins with
KEPT_WEIGHT = 0.999  # of earlier rounds in a calibration, each round
DRAFT_WEIGHT = 1 / 64  # of a new draft in the usual one
GUESS = 0.5  # chance, given its parent, of a node deeper than was drafted
CHANCES = 2 ** (-np.arange(64) / 8)  # (C,) of each class of nodes

# Rows of each forward that drafts, by new slots and by the requests of every further depth.
Passes = Callable[[float, Sequence[float]], Sequence[float]]
Floats = NDArray[np.floating]


class Curve:
    """Seconds by rows: linear between the row counts measured, proportional above the last."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.rows = sorted(seconds)
        self.seconds = [seconds[rows] for rows in self.rows]

    def __call__(self, rows: ArrayLike) -> Floats:
        """Seconds of a forward, or of each of several, by rows."""
        given = np.asarray(rows, float)
        return np.interp(given, self.rows, self.seconds) * np.maximum(1.0, given / self.rows[-1])

    def copy(self) -> "Curve":
        """A curve of the same points, which changes alone."""
        return Curve(dict(zip(self.rows, self.seconds, strict=True)))

    def observe(self, passes: Sequence[float], seconds: float) -> None:
        """Scale the curve a little towards what some forwards took together. Its shape stays: load
        and length of contexts change all of it alike."""
        ratio = min(seconds / float(self(passes).sum()), MAX_RATIO)
        factor = 1 + MEASURED * (ratio - 1)
        self.seconds = [point * factor for point in self.seconds]


class Calibration:
    """The chance that a node is accepted if its parent is, by its depth and the probability that
    the drafter gives it."""

    def __init__(self) -> None:
        # By depth: nodes that the drafter expected to be accepted, and those that were.
        self._sums = defaultdict[int, tuple[float, float]](lambda: (PRIOR_WEIGHT, PRIOR_WEIGHT))

    def __call__(self, depth: int, prob: float) -> float:
        expected, accepted = self._sums[depth]
        return min(1.0, prob * accepted / expected)

    def count(self, draft: Draft, path: Sequence[int]) -> None:
        """A draft was verified and its rows `path` accepted: the target has chosen among the
        children of these rows and of row 0."""
        nodes = list(enumerate(zip(draft.parents, draft.probs, strict=True), start=1))
        for depth, row in enumerate([0, *path]):
            probs = {child: prob for child, (parent, prob) in nodes if parent == row and prob}
            hits = sum(child in path for child in probs)
            expected, accepted = self._sums[depth]
            expected = expected * KEPT_WEIGHT + sum(probs.values())
            self._sums[depth] = (expected, accepted * KEPT_WEIGHT + hits)


def histogram(k: int, depths: Iterable[int], chances: Sequence[float]) -> Floats:
    """The number of nodes (K, C) by depth, all below k, and by the nearest class of chance."""
    classes = -8 * np.log2(np.maximum(chances, CHANCES[-1]))
    counts = np.zeros((k, len(CHANCES)))
    np.add.at(counts, (np.array([*depths], int), np.rint(classes).astype(int)), 1)
    return counts


class Ask(NamedTuple):
    """A request that may be drafted for."""

    missed: int  # slots that the drafter must run first
    left: int  # tokens that it may emit after its next one, which needs no draft


class Budget:
    """Chooses from measured costs and what was accepted so far.

    `passes` are the rows of the drafter's forwards; `verify` is the target's curve, `draft` the
    drafter's, both by rows of one forward.
    """

    def __init__(self, passes: Passes, k: int, verify: Curve, draft: Curve) -> None:
        self.passes = passes
        self.k = k
        self.verify = verify
        self.draft = draft
        self.overhead = 0.0  # seconds of a round outside both models
        self.calibration = Calibration()
        # Nodes (K, C) that a draft usually has, found by the drafter only.
        self.usual = histogram(k, range(k), [GUESS ** (depth + 1) for depth in range(k)])
        self._undrafted = 0.0  # seconds of rounds since the drafter drafted
        self._unprobed = 0.0  # seconds of rounds since nodes that do not pay were verified

    def observe_overhead(self, seconds: float) -> None:
        """Note what a round took outside both models."""
        self.overhead += MEASURED * (seconds - self.overhead)

    def choose(self, load: int, asks: Sequence[Ask], found: Sequence[float] = ()) -> list[int]:
        """Places to draft for each of the requests that go on, 0 to k.

        `load`: requests that decode, or will as soon as their prompts have run. `found`: chances of
        the nodes that need no drafter.
        """
        slot = float(self.draft(PROMPT_ROWS)) / PROMPT_ROWS  # seconds of a missed slot
        _, alone = self._best_count(load, np.sort(found)[::-1], 0.0)
        drafting = list(range(len(asks)))
        while drafting:
            share = len(drafting) / len(asks)
            depth, saved = self._best_depth(load, load * share, found, alone)
            paying = [
                at
                for at in drafting
                if saved * min(asks[at].left, MAX_LEFT) > MIN_SAVED * slot * asks[at].missed
            ]
            if paying == drafting:
                return [min(depth, ask.left) if at in paying else 0 for at, ask in enumerate(asks)]
            drafting = paying
        return self._probe(asks, slot)

    def keep(self, load: int, drafts: Sequence[Draft], spent: float) -> list[int]:
        """The number of nodes to verify of each draft, the likeliest first. Now and then this
        includes a few that do not pay, since this may have changed. `spent`: seconds that drafting
        took."""
        seconds = float(self.verify(load)) + self.overhead
        self._undrafted += seconds
        self._unprobed += seconds
        for draft in drafts:
            if any(draft.probs):  # lookup's nodes have none
                self.usual += DRAFT_WEIGHT * (self._drafted(draft) - self.usual)
                self._undrafted = 0.0
        owners = [at for at, draft in enumerate(drafts) for _ in draft.chances]
        chances = np.array([chance for draft in drafts for chance in draft.chances])
        likeliest = np.argsort(-chances, kind="stable")
        count, _ = self._best_count(load, chances[likeliest], spent)
        more = float(self.verify(load + count + PROBE_NODES) - self.verify(load + count))
        if count < len(chances) and more < PROBE_SHARE * self._unprobed:
            count += PROBE_NODES
            self._unprobed = 0.0
        kept = [0] * len(drafts)
        for node in likeliest[:count]:
            kept[owners[node]] += 1
        return kept

    def _probe(self, asks: Sequence[Ask], slot: float) -> list[int]:
        """Depths where drafting does not pay: 0, but now and then k for one request, since this may
        have changed."""
        depths = [0] * len(asks)
        cheapest = min(range(len(asks)), key=lambda at: asks[at].missed)
        seconds = slot * asks[cheapest].missed + self._drafting(1, self.k, 0)
        if seconds < PROBE_SHARE * self._undrafted:
            depths[cheapest] = min(self.k, asks[cheapest].left)
        return depths

    def _best_depth(
        self, load: int, requests: float, found: Sequence[float], alone: float
    ) -> tuple[int, float]:
        """The depth that pays most if some requests are drafted for, and the seconds that it saves
        for each of their tokens; 0 where none pays. `alone`: seconds a token without drafting."""
        nodes = histogram(1, [0] * len(found), found) + requests * self.usual.cumsum(0)  # (K, C)
        gains = (nodes * CHANCES).cumsum(1)
        drafting = [self._drafting(requests, k, gains[k - 1, -1]) for k in range(1, self.k + 1)]
        seconds = self.verify(load + nodes.cumsum(1)) + np.array(drafting)[:, None] + self.overhead
        paces = seconds / (load + gains)
        best = int(paces.argmin())
        pace = paces.flat[best]
        gain = gains.flat[best]
        if pace * MIN_GAIN >= alone:
            return 0, 0.0
        return best // len(CHANCES) + 1, (alone - pace) * (load + gain) / (requests + gain)

    def _best_count(self, load: int, chances: Floats, spent: float) -> tuple[int, float]:
        """How many nodes are worth verifying, of `chances` in descending order, and the seconds a
        token that a round then takes, to which `spent` is added."""
        tokens = load + np.concatenate([[0.0], chances.cumsum()])
        seconds = self.verify(load + np.arange(len(tokens))) + spent + self.overhead
        paces = seconds / tokens
        count = int(paces.argmin())
        return count, float(paces[count])

    def _drafted(self, draft: Draft) -> Floats:
        """The nodes that only the drafter proposed. What is deeper than the draft is guessed, since
        how deep it is was chosen before."""
        depths = [depth - 1 for depth in draft.depths()]
        looked_up = draft.looked_up()
        own = [row for row in range(1, len(depths)) if row not in looked_up]
        deepest = max(depths)
        last = draft.chances[depths.index(deepest) - 1]
        deeper = range(deepest + 1, self.k)
        chances = [draft.chances[row - 1] for row in own]
        chances += [last * GUESS ** (depth - deepest) for depth in deeper]
        return histogram(self.k, [*(depths[row] for row in own), *deeper], chances)

    def _drafting(self, requests: float, k: int, gain: float) -> float:
        """Seconds of the new slots, one or more a request, and of what follows them."""
        return float(self.draft(self.passes(requests + gain, [requests] * (k - 1))).sum())


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
