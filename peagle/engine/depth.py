"""How many tokens to draft: as many as pay, at the load of the moment. No torch here.

A round with B requests that verifies R rows takes V(R) seconds and drafting takes D; it yields
B + Σ p tokens, p being the chance that a draft token and all before it are accepted. The depth k
that all requests share maximises

    (B + Σᵢ Σ_{j ≤ k} p_ij) / (V(B·(1 + k)) + D(k) + overhead)

and with that rate r, in tokens a second, a token is worth its row where p_ij ≥ r · dV/dR: requests
that are hard to predict draft less, P-EAGLE's others more, their depth being free.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peagle.model.config import Method

FRESH = 0.1  # weight of a new measurement
GAIN = 1.04  # what drafting must promise, over decoding without: estimates are not exact
PROBE = 32  # rounds without drafts before one is tried: acceptance and load change
PRIOR = 0.6, 8.0  # a first guess at acceptance, and the draft tokens it counts for
FORGET = 0.98  # weight a request's earlier rounds keep, a round


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

    def observe(self, passes: Sequence[int], seconds: float) -> None:
        """Bend the curve a little towards what forwards of so many rows took together."""
        factor = 1 + FRESH * (seconds / sum(map(self, passes)) - 1)
        ends = {bisect_left(self.rows, rows) - before for rows in passes for before in (0, 1)}
        for near in {min(max(at, 0), len(self.rows) - 1) for at in ends}:
            self.seconds[near] *= factor


@dataclass(slots=True)
class Odds:
    """How often the j-th draft token was accepted, those before it having been."""

    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def count(self, drafted: int, accepted: int, forget: float) -> None:
        """Add a round; all earlier ones count `forget` times what they did."""
        missing = [0.0] * (drafted - len(self.tried))
        self.tried, self.accepted = self.tried + missing, self.accepted + missing
        for position in range(len(self.tried)):
            self.tried[position] *= forget
            self.accepted[position] *= forget
        for position in range(min(drafted, accepted + 1)):
            self.tried[position] += 1
            self.accepted[position] += position < accepted

    def chances(self, k: int, prior: Sequence[float], weight: float) -> list[float]:
        """p_1 … p_k, each that of the token and all before it; the prior's shares of the one before
        count as `weight` tokens."""
        chance, chances = 1.0, []
        for position in range(k):
            tried, accepted = 0.0, 0.0
            if position < len(self.tried):
                tried, accepted = self.tried[position], self.accepted[position]
            chance *= (prior[position] * weight + accepted) / (weight + tried)
            chances.append(chance)
        return chances


class AdaptiveDepth:
    """Chooses depths from measured costs and the acceptance seen so far.

    `verify` is the target's curve, `draft` the drafter's; both by rows of one forward.
    """

    def __init__(self, method: Method, k: int, verify: Curve, draft: Curve) -> None:
        self.method, self.k, self.verify, self.draft = method, k, verify, draft
        self.overhead = 0.0  # seconds of a round outside both models
        self.everyone = Odds()
        self._quiet = 0

    def count(self, own: Odds, drafted: int, accepted: int) -> None:
        """A round of a request has been verified."""
        own.count(drafted, accepted, FORGET)
        self.everyone.count(drafted, accepted, 1 - (1 - FORGET) / 10)

    def observe_overhead(self, seconds: float) -> None:
        self.overhead += FRESH * (seconds - self.overhead)

    def choose(self, requests: Sequence[Odds]) -> list[int]:
        """A depth for each of the requests that decode, 0 to k."""
        if not requests:
            return []
        chances = self._chances(requests)
        batch, gains, rates = len(requests), [0.0], list[float]()
        for position in range(self.k):
            gains.append(gains[-1] + sum(own[position] for own in chances))
        for k, gain in enumerate(gains):
            spent = self.verify(batch * (1 + k)) + self._drafting(batch, k, gain) + self.overhead
            rates.append((batch + gain) / spent)
        best = max(range(self.k + 1), key=rates.__getitem__)
        if rates[best] < GAIN * rates[0]:
            return [self._probe()] * batch
        self._quiet = 0
        slope = (self.verify(batch * (1 + best)) - self.verify(batch)) / (batch * best)
        most = self.k if self.method == "p-eagle" else best
        worth = rates[best] * slope
        return [sum(chance >= worth for chance in own[:most]) for own in chances]

    def _chances(self, requests: Sequence[Odds]) -> list[list[float]]:
        guess, weight = PRIOR
        so_far = self.everyone.chances(self.k, [guess] * self.k, weight)
        shares = [p / q for p, q in zip(so_far, [1.0, *so_far], strict=False)]
        return [own.chances(self.k, shares, weight) for own in requests]

    def _drafting(self, batch: int, k: int, gain: float) -> float:
        """Seconds: the new slots, one or more a request, then placeholders or further passes."""
        if k == 0:
            return 0.0
        if self.method == "p-eagle":
            return self.draft(batch * k + gain)
        return self.draft(batch + gain) + (k - 1) * self.draft(batch)

    def _probe(self) -> int:
        self._quiet = (self._quiet + 1) % PROBE
        return int(self._quiet == 0)


def measure(run: Callable[[int], float], most: int) -> Curve:
    """A curve up to `most` rows: `run` takes rows and returns seconds."""
    rows = [1]
    while rows[-1] < most:
        rows.append(min(2 * rows[-1], most))
    seconds = {count: min(run(count) for _ in range(3)) for count in rows}
    # More rows never take less: where they did, what came before was disturbed.
    for fewer, more in zip(rows[-2::-1], rows[:0:-1], strict=True):
        seconds[fewer] = min(seconds[fewer], seconds[more])
    return Curve(seconds)
