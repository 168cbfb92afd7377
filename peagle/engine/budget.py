"""What to draft and what to verify: what pays, at the load of the moment. No torch here.

One rule, twice: (requests + Σ chances of the nodes verified) / time of the round, as large as it
can be. *Before drafting*, the nodes are those that drafts usually have, and the time includes
drafting. *After drafting*, they are those of all requests' drafts: the likeliest are verified, as
many as are worth their rows. A request may get no node at all. So speculation fades out as the
machine fills up, from the least likely nodes on.

Before a drafter can draft for a request, it must run the slots that it has missed, such as a
prompt. That pays if drafting saves well more on the tokens that the request has left. A drafter's
forward that pays for many requests may not pay for a few of them.

Plain Python: after a target forward the caches hold nothing of numpy, and its calls, on a few dozen
numbers, would take several times as long.

Shapes: K depths, C classes of chance.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import log2
from operator import mul
from typing import NamedTuple

from peagle.engine.tree import Draft

MEASURED = 0.1  # weight of a new measurement
MAX_RATIO = 1.5  # of a measurement to what was expected: a first forward may take ten times as long
MIN_GAIN = 1.04  # what drafting must promise, over decoding without: estimates are not exact
MAX_LEFT = 512  # tokens that a request is expected to have left, at most
MIN_SAVED = 2.0  # times what its missed slots cost: a request may end early
PROMPT_ROWS = 256  # of the drafter's forward that is measured for prompts
REST = 4  # rounds in which nobody asks, where asking takes more time than it saves
PROBE_NODES = 3  # that are verified though they do not pay
PROBE_SHARE = (
    0.005  # of the time, at most, goes to these nodes, and as much to drafts that do not pay
)
PRIOR_WEIGHT = 8.0  # expected tokens that a depth's calibration begins with
KEPT_WEIGHT = 0.999  # of earlier rounds in a calibration, each round
DRAFT_WEIGHT = 1 / 64  # of a new draft in the usual one
GUESS = 0.5  # chance, given its parent, of a node deeper than was drafted
CHANCES = [2 ** (-number / 4) for number in range(32)]  # (C,) of each class of nodes

# Rows of each forward that drafts, by new slots and by the requests of every further depth.
Passes = Callable[[float, Sequence[float]], Sequence[float]]


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

    def least_step(self, rows: int) -> float:
        """Seconds of one more row where it costs least, at `rows` or above."""
        points = list(zip(self.rows, self.seconds, strict=True))
        steps = [
            (seconds - before) / (more - fewer)
            for (fewer, before), (more, seconds) in pairwise(points)
            if more > rows
        ]
        return min([*steps, self.seconds[-1] / self.rows[-1]])

    def observe(self, passes: Sequence[float], seconds: float) -> None:
        """Move the curve a little towards what some forwards took together: the points between
        which these lie, and all others half as far. What slows the machine down slows all of it;
        its shape changes, too, as with the length of contexts."""
        step = MEASURED * (min(seconds / sum(map(self, passes)), MAX_RATIO) - 1)
        near = {at for rows in passes for at in self._beside(rows)}
        self.seconds = [
            point * (1 + (step if at in near else step / 2))
            for at, point in enumerate(self.seconds)
        ]

    def _beside(self, rows: float) -> tuple[int, int]:
        """The points between which some rows lie, which may be one point twice."""
        last = len(self.rows) - 1
        return max(0, bisect_right(self.rows, rows) - 1), min(last, bisect_left(self.rows, rows))


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


def histogram(k: int, nodes: Iterable[tuple[int, float]]) -> list[list[float]]:
    """The number of nodes (K, C), given by depth, below k, and chance: by the nearest class."""
    counts = [[0.0] * len(CHANCES) for _ in range(k)]
    for depth, chance in nodes:
        counts[depth][round(-4 * log2(max(chance, CHANCES[-1])))] += 1
    return counts


class Ask(NamedTuple):
    """A request that may be drafted for."""

    missed: int  # slots that the drafter must run first
    left: int  # tokens that it may emit after its next one, which needs no draft


class Round(NamedTuple):
    """The costs of a round that only decoded, in seconds."""

    rows: int  # of the target's forward
    drafter_rows: list[float]  # of each of the drafter's forwards
    verifying: float
    drafting: float
    overhead: float  # outside both models


class FixedBudget:
    """Drafts and verifies the same in every round, whatever it costs."""

    def __init__(self, k: int, nodes: int) -> None:
        self.k, self.nodes = k, nodes
        self.calibration = Calibration()

    def rests(self, load: int) -> bool:
        """See `Budget`."""
        return not self.nodes

    def choose(self, load: int, asks: Sequence[Ask], found: Sequence[float] = ()) -> list[int]:
        """See `Budget`."""
        return [self.k] * len(asks)

    def least(self, load: int) -> float:
        """See `Budget`."""
        return 0.0

    def keep(self, load: int, drafts: Sequence[Draft], spent: float, drafted: bool) -> list[int]:
        """See `Budget`."""
        return [self.nodes] * len(drafts)

    def learn(self, costs: Round) -> None:
        """See `Budget`."""


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
        self.usual = histogram(k, ((depth, GUESS ** (depth + 1)) for depth in range(k)))
        self._undrafted = 0.0  # seconds of rounds since the drafter drafted
        self._unprobed = 0.0  # seconds of rounds since nodes that do not pay were verified
        self._saved = 0.0  # seconds that asking lookup alone has saved lately, a time
        self._rest = (0, 0)  # at this load nobody asks in so many rounds

    def learn(self, costs: Round) -> None:
        """Correct the costs by those of a round."""
        self.verify.observe([costs.rows], costs.verifying)
        if costs.drafter_rows:
            self.draft.observe(costs.drafter_rows, costs.drafting)
        self.overhead += MEASURED * (costs.overhead - self.overhead)

    def choose(self, load: int, asks: Sequence[Ask], found: Sequence[float] = ()) -> list[int]:
        """Places to draft for each of the requests that go on, 0 to k.

        `load`: requests that decode, or will as soon as their prompts have run. `found`: chances of
        the nodes that need no drafter.
        """
        slot = self.draft(PROMPT_ROWS) / PROMPT_ROWS  # seconds of a missed slot
        least = self.least(load)
        likeliest = sorted((chance for chance in found if chance >= least), reverse=True)
        _, alone = self._best_count(load, likeliest, 0.0)
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

    def least(self, load: int) -> float:
        """The chance below which no node that lookup finds is verified.

        The last node that pays saves more than its row costs, at the pace of a round without nodes
        or a better one.
        """
        if self._probes(load):
            return 0.0
        return self.verify.least_step(load) * load / (self.verify(load) + self.overhead)

    def rests(self, load: int) -> bool:
        """Whether a round drafts nothing, unasked: at this load asking has not paid lately."""
        then, rounds = self._rest
        if load != then or not rounds:
            return False
        self._rest = (load, rounds - 1)
        self._pass(load)
        return True

    def keep(self, load: int, drafts: Sequence[Draft], spent: float, drafted: bool) -> list[int]:
        """The number of nodes to verify of each draft, the likeliest first. Now and then this
        includes a few that do not pay, since this may have changed.

        `spent`: seconds that drafting took. `drafted`: the drafter ran; else only lookup was asked.
        """
        self._pass(load)
        for draft in drafts:
            if any(draft.probs):  # lookup's nodes have none
                self._note(draft)
                self._undrafted = 0.0
        nodes = [(chance, at) for at, draft in enumerate(drafts) for chance in draft.chances]
        nodes.sort(key=lambda node: -node[0])
        count, pace = self._best_count(load, [chance for chance, _ in nodes], spent)
        if not drafted:
            tokens = load + sum(chance for chance, _ in nodes[:count])
            alone = (self.verify(load) + self.overhead) / load
            self._saved += MEASURED * (tokens * (alone - pace) - self._saved)
            self._rest = (load, REST if self._saved < 0 else 0)
        if count < len(nodes) and self._probes(load + count):
            count += PROBE_NODES
            self._unprobed = 0.0
        kept = [0] * len(drafts)
        for _, at in nodes[:count]:
            kept[at] += 1
        return kept

    def _pass(self, load: int) -> None:
        """A round's time has passed."""
        seconds = self.verify(load) + self.overhead
        self._undrafted += seconds
        self._unprobed += seconds

    def _probes(self, rows: int) -> bool:
        """Whether nodes that do not pay may be verified beside some rows."""
        more = self.verify(rows + PROBE_NODES) - self.verify(rows)
        return more < PROBE_SHARE * self._unprobed

    def _probe(self, asks: Sequence[Ask], slot: float) -> list[int]:
        """Depths where drafting does not pay: 0, but now and then k for one request, since this may
        have changed."""
        depths = [0] * len(asks)
        cheapest = min(range(len(asks)), key=lambda at: asks[at].missed)
        seconds = slot * asks[cheapest].missed + self._drafting(1, self.k, 0.0)
        if seconds < PROBE_SHARE * self._undrafted:
            self._undrafted = 0.0
            depths[cheapest] = min(self.k, asks[cheapest].left)
        return depths

    def _best_depth(
        self, load: int, requests: float, found: Sequence[float], alone: float
    ) -> tuple[int, float]:
        """The depth that pays most if some requests are drafted for, and the seconds that it saves
        for each of their tokens; 0 where none pays. `alone`: seconds a token without drafting."""
        [nodes] = histogram(1, ((0, chance) for chance in found))
        best, deepest, gain = alone / MIN_GAIN, 0, 0.0
        for depth, usual in enumerate(self.usual, start=1):
            nodes = [own + requests * more for own, more in zip(nodes, usual, strict=True)]
            accepted = sum(map(mul, nodes, CHANCES))
            spent = self._drafting(requests, depth, accepted)
            for pace, tokens in self._paces(load, nodes, CHANCES, spent):
                if pace < best:
                    best, deepest, gain = pace, depth, tokens - load
        if not deepest:
            return 0, 0.0
        return deepest, (alone - best) * (load + gain) / (requests + gain)

    def _best_count(self, load: int, chances: Sequence[float], spent: float) -> tuple[int, float]:
        """How many nodes are worth verifying, of `chances` in descending order, and the seconds a
        token that a round then takes, to which `spent` is added."""
        paces = self._paces(load, [0.0] + [1.0] * len(chances), [1.0, *chances], spent)
        pace, count = min((pace, count) for count, (pace, _) in enumerate(paces))
        return count, pace

    def _paces(
        self, load: int, numbers: Sequence[float], chances: Sequence[float], spent: float
    ) -> Iterator[tuple[float, float]]:
        """Seconds a token, and tokens, of a round that verifies nodes up to each group of them:
        `numbers` of nodes with `chances`."""
        fixed = spent + self.overhead
        rows = tokens = float(load)
        for number, chance in zip(numbers, chances, strict=True):
            rows += number
            tokens += number * chance
            yield (self.verify(rows) + fixed) / tokens, tokens

    def _note(self, draft: Draft) -> None:
        """Count the nodes that only the drafter proposed as usual ones. What is deeper than the
        draft is guessed, since how deep it is was chosen before."""
        depths = [depth - 1 for depth in draft.depths()]
        looked_up = draft.looked_up()
        own = [row for row in range(1, len(depths)) if row not in looked_up]
        deepest = max(depths)
        last = draft.chances[depths.index(deepest) - 1]
        nodes = [(depths[row], draft.chances[row - 1]) for row in own]
        nodes += [(d, last * GUESS ** (d - deepest)) for d in range(deepest + 1, self.k)]
        drafted = histogram(self.k, nodes)
        for usual, now in zip(self.usual, drafted, strict=True):
            usual[:] = [
                old + DRAFT_WEIGHT * (new - old) for old, new in zip(usual, now, strict=True)
            ]

    def _drafting(self, requests: float, k: int, gain: float) -> float:
        """Seconds of the new slots, one or more a request, and of what follows them."""
        return sum(map(self.draft, self.passes(requests + gain, [requests] * (k - 1))))
