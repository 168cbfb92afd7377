"""What to draft and what to verify: what pays, at the load of the moment. No torch here.

One rule, twice: (requests + Σ chances of the nodes verified) / time of the round, as large as it
can be. *Before drafting* the nodes are those of recent drafts, and the time includes that of
drafting. *After drafting* they are those that were drafted, of all requests together: the likeliest
of them, as many as are worth their rows. No node for a request is a legal outcome. So speculation
fades out as the machine fills up, from the nodes least likely to stand.

A drafter that is to draft for a request must run its prompt first. That pays where what is saved on
the tokens the request has left is well more than what those slots cost. Where it pays for some
only, these have to bear all of what a drafter's forward costs, so it is asked again for them.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from peagle.engine.tree import Draft

FRESH = 0.1  # weight of a new measurement of seconds
HICCUP = 2.0  # times as long as expected: more says nothing of what rows cost
TRIES = 5  # forwards of each number of rows, at the start
GAIN = 1.04  # what drafting must promise, over decoding without: estimates are not exact
MARGIN = 2.0  # times what its slots cost that a request must save: it may end early
PROBE = 3  # tokens drafted for one request after a while without drafts: things change
PROBING = 0.01  # of the time, at most, goes to that
PRIOR = 8.0  # accepted tokens that a drafter's word counts for
FORGET = 0.999  # weight that earlier tokens keep, a round
ANSWER = 512  # tokens that an answer is thought to have left at most, whatever it may
PROMPT = 256  # rows of a drafter's forward over a prompt, as measured
RECENT = 64  # drafts that stand for the next ones
HOPED = 16  # of them at first, as good as `UNKNOWN`: few drafts say little, and none are no news
DEPTHS = (1, 2, 3, 4, 6)  # that are tried beside the deepest
UNKNOWN = 0.5  # chance, given the one before, of a token deeper than was drafted
# Rows of each forward that drafts, by new slots and by the requests of every further depth.
Passes = Callable[[float, Sequence[float]], Sequence[float]]
Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


class Curve:
    """Seconds by rows, linear between the row counts measured, proportional behind the last."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.rows = sorted(seconds)
        self.seconds = [seconds[rows] for rows in self.rows]

    def __call__(self, rows: float) -> float:
        at = bisect_left(self.rows, rows)
        if at == 0:
            return self.seconds[0]
        if at == len(self.rows):
            return self.seconds[-1] * rows / self.rows[-1]
        low, high = self.rows[at - 1], self.rows[at]
        share = (rows - low) / (high - low)
        return self.seconds[at - 1] * (1 - share) + self.seconds[at] * share

    def of(self, rows: Floats) -> Floats:
        """Seconds of each of many numbers of rows."""
        within: Floats = np.interp(rows, self.rows, self.seconds)
        return within * np.maximum(1.0, rows / self.rows[-1])

    def copy(self) -> "Curve":
        """A curve of the same points, which changes alone."""
        return Curve(dict(zip(self.rows, self.seconds, strict=True)))

    def observe(self, passes: Sequence[float], seconds: float) -> None:
        """Scale the curve a little towards what forwards of so many rows took together. Its shape
        stays: the load and the length of contexts move all of it, while the first forward of so
        many rows takes ten times as long as the next, and would make them look dear for good."""
        ratio = min(seconds / sum(map(self, passes)), HICCUP)
        factor = 1 + FRESH * (ratio - 1)
        self.seconds = [point * factor for point in self.seconds]


class Ask(NamedTuple):
    """A request that may be drafted for."""

    behind: int  # slots that the drafter has to run before
    left: int  # tokens that it may say behind its next one, which needs no draft

    def pays(self, saved: float, slot: float) -> bool:
        """Whether what is saved, in seconds a token, is well more than the slots cost."""
        return saved * min(self.left, ANSWER) > MARGIN * self.behind * slot


class Calibration:
    """The chance that a node is accepted where its parent was, by its depth and the probability the
    drafter gives it: how much oftener nodes of that depth are accepted than the drafter says."""

    def __init__(self) -> None:
        self.said = list[float]()  # by depth: the probabilities of what could be accepted
        self.accepted = list[float]()

    def __call__(self, depth: int, prob: float) -> float:
        if depth >= len(self.said):
            return prob
        return min(1.0, prob * self.accepted[depth] / self.said[depth])

    def count(self, draft: Draft, path: Sequence[int]) -> None:
        """A draft was verified and its rows `path` accepted: the children of these rows, and of the
        newest token, say something."""
        depths = {row: depth for depth, row in enumerate([0, *path])}
        missing = len(depths) - len(self.said)
        self.said += [PRIOR] * missing
        self.accepted += [PRIOR] * missing
        for depth in range(len(depths)):
            self.said[depth] *= FORGET
            self.accepted[depth] *= FORGET
        nodes = zip(draft.parents, draft.probs, strict=True)
        for row, (parent, prob) in enumerate(nodes, start=1):
            if prob and parent in depths:  # 0: not the drafter's
                depth = depths[parent]
                self.said[depth] += prob
                self.accepted[depth] += row in depths


class Seen(NamedTuple):
    """The nodes of a draft: their chances, and their depths from 0."""

    chances: Floats
    depths: Ints


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
        self._depths = sorted({depth for depth in DEPTHS if depth < k} | {k})
        hoped = Seen(np.cumprod([UNKNOWN] * k), np.arange(k))
        self._recent = deque[Seen]([hoped] * HOPED, RECENT)
        self._quiet = 0.0  # seconds since something was drafted

    def observe_overhead(self, seconds: float) -> None:
        self.overhead += FRESH * (seconds - self.overhead)

    def choose(self, load: int, requests: Sequence[Ask], found: Sequence[Draft] = ()) -> list[int]:
        """Places to draft for each of the requests that go on, 0 to k. `load` requests decode, or
        will as soon as their prompts have run. `found`: what there is to verify anyway."""
        some, slot = list(range(len(requests))), self.draft(PROMPT) / PROMPT
        known = [chance for draft in found for chance in draft.chances]
        _, alone = self._prefix(load, known, 0.0)
        while some:
            depth, saved = self._best(load, load * len(some) / len(requests), known, alone)
            paying = [at for at in some if requests[at].pays(saved, slot)] if depth else []
            if paying == some:
                return [min(depth, r.left) if at in some else 0 for at, r in enumerate(requests)]
            some = paying
        self._quiet += self.verify(load) + self.overhead
        depths, behind = [0] * len(requests), [request.behind for request in requests]
        if behind and self._probe(load, min(behind) * slot) < PROBING * self._quiet:
            at = behind.index(min(behind))
            depths[at] = min(PROBE, self.k, requests[at].left)
        return depths

    def _best(
        self, load: int, drafting: float, known: Sequence[float], alone: float
    ) -> tuple[int, float]:
        """The depth that pays most where so many of the requests are drafted for, and the seconds
        it saves for each of their tokens, which take `alone` seconds without. `known`: the chances
        of nodes that need no drafter."""
        depth, saved, best = 0, 0.0, alone / GAIN
        every = np.concatenate([*(own.chances for own in self._recent), known])
        depths = np.concatenate([*(own.depths for own in self._recent), np.full(len(known), -1)])
        order = np.argsort(-every)
        every, depths = every[order], depths[order]
        weights = np.where(depths < 0, 1.0, drafting / len(self._recent))
        for k in self._depths:
            own = weights * (depths < k)
            kept, gain = np.cumsum(own), np.cumsum(own * every)
            spent = self._drafting(drafting, k, float(gain[-1])) + self.overhead
            paces = (self.verify.of(load + kept) + spent) / (load + gain)
            at = int(paces.argmin())
            if paces[at] < best:
                depth, best = k, float(paces[at])
                saved = (alone - best) * (load + gain[at]) / (drafting + gain[at])
        return depth, saved

    def _probe(self, load: int, behind: float) -> float:
        """Seconds of drafting for one request, those of its slots included, and of verifying."""
        return behind + self.draft(PROBE) + self.verify(load + PROBE) - self.verify(load)

    def keep(self, load: int, drafts: Sequence[Draft], spent: float) -> list[int]:
        """How many nodes of each draft to verify, the likeliest. `spent`: seconds of drafting."""
        for draft in drafts:
            if any(draft.probs):  # 0: not the drafter's
                self._recent.append(self._seen(draft))
                self._quiet = 0.0
        owners = [at for at, draft in enumerate(drafts) for _ in draft.chances]
        chances = [chance for draft in drafts for chance in draft.chances]
        best, _ = self._prefix(load, chances, spent)
        kept = [0] * len(drafts)
        for at in best:
            kept[owners[at]] += 1
        return kept

    def _prefix(self, load: int, chances: Sequence[float], spent: float) -> tuple[Ints, float]:
        """The nodes that are worth verifying, and the seconds a token that a round then takes, to
        which `spent` is added."""
        every = np.array(chances)
        order = np.argsort(-every, kind="stable")
        rows = load + np.arange(len(order) + 1.0)
        seconds = self.verify.of(rows) + spent + self.overhead
        paces = seconds / (load + np.concatenate([[0.0], np.cumsum(every[order])]))
        count = int(paces.argmin())
        return order[:count], float(paces[count])

    def _seen(self, draft: Draft) -> Seen:
        """What only the drafter knew, and a chain below as deep as may be drafted: how deep a draft
        is was chosen before."""
        known = set(draft.looked_up())
        own = [row for row in range(1, len(draft) + 1) if row not in known]
        chances = [draft.chances[row - 1] for row in own]
        tails = draft.tails()
        depths = [len(tails[row]) - 1 for row in own]
        last = draft.chances[draft.parents.index(0)] if not own else chances[int(np.argmax(depths))]
        deepest = max(depths, default=0)
        behind = np.arange(1, self.k - deepest)
        return Seen(
            np.concatenate([chances, last * UNKNOWN**behind]),
            np.concatenate([depths, deepest + behind]),
        )

    def _drafting(self, requests: float, k: int, gain: float) -> float:
        """Seconds of the new slots, one or more a request, and of what follows them."""
        return sum(map(self.draft, self.passes(requests + gain, [requests] * (k - 1))))


def measure(run: Callable[[int], float], most: int, *also: int) -> Curve:
    """A curve up to `most` rows, and also at more: `run` takes rows and returns seconds. All row
    counts take turns, so that what slows the machine down for a while slows all of them."""
    rows = [1]
    while rows[-1] < most:
        rows.append(min(2 * rows[-1], most))
    rows += [count for count in also if count > most]
    rounds = [[run(count) for count in rows] for _ in range(TRIES)]
    seconds = dict(zip(rows, map(min, *rounds), strict=True))
    # More rows never take less: where they did, what came before was disturbed.
    for fewer, more in zip(rows[-2::-1], rows[:0:-1], strict=True):
        seconds[fewer] = min(seconds[fewer], seconds[more])
    return Curve(seconds)
