"""How many tokens to draft and to verify: as many as pay, at the load of the moment. No torch here.

A drafter knows how sure it is: the probability it gives a token is, nearly, the chance that the
target agrees. Calibrated on what has been verified, it tells of every drafted token the chance p_ij
that it and all before it stand. With B requests a round that verifies R rows takes V(R) seconds,
drafting k tokens each D(k); k maximises

    (B + Σ p_ij of the tokens verified) / (V(R) + D(k) + overhead)

over recent drafts, and with that rate r, in tokens a second, a token is verified where p_ij is at
least r · dV/dR, what its row costs. So speculation fades out as the machine fills up, from the
tokens least likely to stand.

A drafter that is to draft for a request must run its prompt first. That pays where what is saved on
the tokens the request has left is well more than what those slots cost. Where it pays for some
only, these have to bear all of what a drafter's forward costs, so it is asked again for them.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

FRESH = 0.1  # weight of a new measurement of seconds
HICCUP = 2.0  # times as long as expected: more says nothing of what rows cost
TRIES = 5  # forwards of each number of rows, at the start
GAIN = 1.04  # what drafting must promise, over decoding without: estimates are not exact
MARGIN = 2.0  # times what its slots cost that a request must save: it may end early
PROBE = 3  # tokens drafted for one request after a while without drafts: things change
PROBING = 0.01  # of the time, at most, goes to that
BINS = 10  # of a drafter's confidence
PRIOR = 8.0  # draft tokens that a bin's own middle counts for
FORGET = 0.999  # weight a bin's earlier tokens keep, a token
ANSWER = 512  # tokens that an answer is thought to have left at most, whatever it may
PROMPT = 256  # rows of a drafter's forward over a prompt, as measured
RECENT = 64  # drafts that stand for the next ones
HOPED = 16  # of them at first, as good as `UNKNOWN`: few drafts say little, and none are no news
UNKNOWN = 0.5  # chance, given the one before, of a token deeper than was drafted
# Rows of each forward that drafts, by new slots and by the requests of every further depth.
Passes = Callable[[float, Sequence[float]], Sequence[float]]


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
    """The chance that a draft token is accepted, given that all before it were, by the probability
    the drafter gives it."""

    def __init__(self) -> None:
        self.tried = [PRIOR] * BINS
        self.accepted = [PRIOR * (at + 0.5) / BINS for at in range(BINS)]

    def __call__(self, confidence: float) -> float:
        at = _bin(confidence)
        return self.accepted[at] / self.tried[at]

    def count(self, confidences: Sequence[float], accepted: int) -> None:
        """A draft was verified: all tokens up to the first that was refused say something."""
        for position, confidence in enumerate(confidences[: accepted + 1]):
            at = _bin(confidence)
            self.tried[at] = self.tried[at] * FORGET + 1
            self.accepted[at] = self.accepted[at] * FORGET + (position < accepted)


class AdaptiveDepth:
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
        self.worth = 0.0  # least chance of a token that is verified
        self._recent = deque([self._extended([UNKNOWN])] * HOPED, RECENT)
        self._quiet = 0.0  # seconds since something was drafted

    def observe_overhead(self, seconds: float) -> None:
        self.overhead += FRESH * (seconds - self.overhead)

    def choose(self, load: int, requests: Sequence[Ask]) -> list[int]:
        """Draft tokens for each of the requests that go on, 0 to k. `load` requests decode, or will
        as soon as their prompts have run."""
        some, slot = list(range(len(requests))), self.draft(PROMPT) / PROMPT
        while some:
            depth, saved = self._best(load, load * len(some) / len(requests))
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

    def _best(self, load: int, drafting: float) -> tuple[int, float]:
        """The depth that pays most where so many of the requests are drafted for, and the seconds
        it saves for each of their tokens."""
        alone = (self.verify(load) + self.overhead) / load  # seconds a token
        depth, saved, best, kept, gain = 0, 0.0, alone / GAIN, 0.0, 0.0
        for k, chances in enumerate(zip(*self._recent, strict=True), start=1):
            verified = [chance for chance in chances if chance >= self.worth]
            kept += drafting * len(verified) / len(self._recent)
            gain += drafting * sum(verified) / len(self._recent)
            spent = self.verify(load + kept) + self._drafting(drafting, k, gain) + self.overhead
            pace = spent / (load + gain)
            if pace < best:
                depth, best = k, pace
                saved = (alone - pace) * (load + gain) / (drafting + gain)
        steepness = self.verify(load * (1 + self.k)) - self.verify(load)
        self.worth = steepness / (load * self.k) / min(alone, best)
        return depth, saved

    def _probe(self, load: int, behind: float) -> float:
        """Seconds of drafting for one request, those of its slots included, and of verifying."""
        return behind + self.draft(PROBE) + self.verify(load + PROBE) - self.verify(load)

    def trim(self, confidences: Sequence[float]) -> int:
        """How many of a draft's tokens to verify."""
        chance, chances = 1.0, list[float]()
        for confidence in confidences:
            chance *= self.calibration(confidence)
            chances.append(chance)
        if chances:
            self._quiet = 0.0
            self._recent.append(self._extended(chances))
        return sum(chance >= self.worth for chance in chances)

    def _extended(self, chances: list[float]) -> list[float]:
        """Of k tokens, however many were drafted."""
        more = range(1, self.k - len(chances) + 1)
        return chances + [chances[-1] * UNKNOWN**behind for behind in more]

    def _drafting(self, requests: float, k: int, gain: float) -> float:
        """Seconds of the new slots, one or more a request, and of what follows them."""
        return sum(map(self.draft, self.passes(requests + gain, [requests] * (k - 1))))


def _bin(confidence: float) -> int:
    return min(BINS - 1, int(confidence * BINS))


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
