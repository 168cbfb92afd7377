"""The budget that minimises the time per token, at the load of the moment. No torch here.

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

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from math import inf, log2
from operator import mul
from typing import NamedTuple

from peagle.engine.budget import Ask, Budget, Round
from peagle.engine.costs import MAX_RATIO, MEASURED, PROMPT_ROWS, Curve
from peagle.engine.tree import Draft

MIN_GAIN = 1.04  # minimum promised speed-up over decoding without drafts: estimates are not exact
MIN_NODES_GAIN = 1.02  # the same of a round whose drafts are known
MAX_LEFT = 512  # maximum number of tokens that a request is expected to have left
MIN_SAVED = 2.0  # drafting must save this many times what missed slots cost: answers end early
REST = 8  # rounds after which it is asked again whether drafting pays, where it did not
EXPLORE_NODES = 3  # nodes that are verified to explore
EXPLORE_SHARE = 0.005  # maximum share of time for exploring nodes, and as much for exploring drafts
DRAFT_WEIGHT = 1 / 64  # weight of a new draft in the expected one
GUESS = 0.5  # chance of a node, given its parent, before anything was drafted
SLOW = 8.0  # ratio of a slow forward's seconds to those that the engine began with
MAX_SLOW_SECONDS = 10.0  # slow forwards in a row take this long before a warning
CHANCES = [2 ** (-number / 4) for number in range(32)]  # (C,) of each class of nodes

log = logging.getLogger(__name__)

# Rows of each forward that drafts, by new slots and by the requests of every further depth.
Passes = Callable[[float, Sequence[float]], Sequence[float]]


def histogram(k: int, nodes: Iterable[tuple[int, float]]) -> list[list[float]]:
    """The number of nodes (K, C), given by depth, below k, and chance: by the nearest class."""
    counts = [[0.0] * len(CHANCES) for _ in range(k)]
    for depth, chance in nodes:
        counts[depth][round(-4 * log2(max(chance, CHANCES[-1])))] += 1
    return counts


class Option(NamedTuple):
    """A round that verifies the first groups of nodes, likeliest first; the best has the lowest
    pace."""

    pace: float  # seconds per token
    groups: int
    tokens: float  # emitted, on average


class Plan(NamedTuple):
    """The draft depth that saves most, and the seconds that it saves for each token of the requests
    that are drafted for; 0 where no depth pays."""

    depth: int
    saved: float


class AdaptiveBudget(Budget):
    """Chooses from measured costs and the tokens accepted so far.

    `passes` are the rows of the drafter's forwards, one or more; `verify` is the target's curve,
    `draft` the drafter's, both by rows of one forward. The first forward also pays for what a round
    that drafts needs once: features, candidates, trees.
    """

    def __init__(self, passes: Passes, k: int, verify: Curve, draft: Curve) -> None:
        super().__init__(k)
        self.passes = passes
        self.verify = verify
        self._first_verify = deepcopy(verify)  # as the engine began
        self._slow = 0.0  # seconds of the newest forwards, while all of them are slow
        self._warned = False
        self.draft = draft  # of the first forward
        self.deeper = deepcopy(draft)  # of the others
        self.extra = 0.0  # seconds of drafting beside the drafter's forwards
        self.overhead = 0.0  # seconds of a round outside both models
        # Nodes (K, C) that a draft is expected to have, found by the drafter only.
        self.expected = histogram(k, ((depth, GUESS ** (depth + 1)) for depth in range(k)))
        self._resting = 0  # rounds for which drafting is known not to pay,
        self._resting_load = 0  # at this load or a larger one,
        self._resting_worth = 0.0  # for requests with at most so many tokens left a missed slot
        self._undrafted = 0.0  # seconds of rounds since the drafter drafted
        self._unexplored = 0.0  # seconds of rounds since nodes were verified to explore

    def learn(self, costs: Round) -> None:
        """Correct the costs by those of a round. What slows the target down slows the drafter,
        too, which does not run while it does not pay."""
        self._watch(costs.rows, costs.verifying)
        factor = self.verify.observe([costs.rows], costs.verifying)
        if costs.drafter_rows:
            self._learn_drafting(costs.drafter_rows, costs.drafting)
        else:
            self.draft.scale(factor)
            self.deeper.scale(factor)
        self.overhead += MEASURED * (costs.overhead - self.overhead)

    def _watch(self, rows: int, seconds: float) -> None:
        """Warn once when the target's forwards have become far slower than they were."""
        ratio = seconds / self._first_verify(rows)
        self._slow = self._slow + seconds if ratio > SLOW else 0.0
        if self._slow > MAX_SLOW_SECONDS and not self._warned:
            self._warned = True
            why = "other processes seem to use this device"
            fix = "on a CPU, OMP_NUM_THREADS=1 leaves them room"
            log.warning("forwards take %.0f times as long as before: %s; %s", ratio, why, fix)

    def _learn_drafting(self, rows: Sequence[float], seconds: float) -> None:
        """Rounds of several depths and sizes tell the costs of each forward, of its rows, and of
        what no row costs, such as trees: an error is shared by the squares of the expected parts
        (normalised least mean squares)."""
        first, one = self.draft(rows[0]), self.draft(1)
        fixed, by_rows, deeper = self.extra + one, first - one, sum(map(self.deeper, rows[1:]))
        share = (seconds - fixed - by_rows - deeper) / (fixed**2 + by_rows**2 + deeper**2)
        self.extra += MEASURED * fixed * min(share * fixed, MAX_RATIO - 1)
        self.draft.observe(rows[:1], first + share * by_rows**2)
        if deeper:
            self.deeper.observe(rows[1:], deeper + share * deeper**2)

    def choose(self, load: int, asks: Sequence[Ask], found: Sequence[float]) -> list[int]:
        """First the depth for all; then, if some cannot pay for the slots that they have missed,
        the depth for the others. A plan takes a few hundred microseconds, which requests that are
        not drafted for would not earn back."""
        slot = self.draft(PROMPT_ROWS) / PROMPT_ROWS  # seconds of a missed slot
        worth = [min(ask.left, MAX_LEFT) / max(1, ask.missed) for ask in asks]
        if self._resting and load >= self._resting_load and max(worth) <= self._resting_worth:
            self._resting -= 1
            return self._explore(asks, slot)
        plan = self._plan(load, load, found)
        paying = [at for at, each in enumerate(worth) if plan.saved * each > MIN_SAVED * slot]
        if not paying:
            free = self._plan(load, load, []) if found else plan
            if free.saved * max(worth) <= MIN_SAVED * slot:  # not with nothing looked up, either
                self._resting, self._resting_load = REST, load
                self._resting_worth = max(worth) if free.depth else inf
        elif len(paying) < len(asks):
            plan = self._plan(load, load * len(paying) / len(asks), found)
        if not paying or not plan.depth:
            return self._explore(asks, slot)
        return [min(plan.depth, ask.left) if at in paying else 0 for at, ask in enumerate(asks)]

    def min_chance(self, load: int, spent: float) -> float:
        """See `Budget`; 0 where nodes may be verified to explore."""
        return 0.0 if self._explores(load) else self._min_chance(load, self._best(load, [], spent))

    def keep(self, load: int, drafts: Sequence[Draft], spent: float) -> list[int]:
        """See `Budget`. Now and then this includes a few nodes that do not pay, since this may have
        changed."""
        seconds = self.verify(load) + self.overhead
        self._undrafted += seconds
        self._unexplored += seconds
        for draft in drafts:
            if any(draft.probs):  # lookup's nodes have none
                self._note(draft)
                self._undrafted = 0.0
        nodes = [(chance, at) for at, draft in enumerate(drafts) for chance in draft.chances]
        nodes.sort(key=lambda node: -node[0])
        alone = (seconds + spent) / load  # the pace without nodes
        best = self._best(load, [(1.0, chance) for chance, _ in nodes], spent)
        count = best.groups if best.pace * MIN_NODES_GAIN < alone else 0
        if count < len(nodes) and self._explores(load + count):
            count += EXPLORE_NODES
            self._unexplored = 0.0
        kept = Counter(at for _, at in nodes[:count])
        return [kept[at] for at in range(len(drafts))]

    def _explores(self, rows: int) -> bool:
        """Whether this round verifies extra nodes, next to `rows` rows, to explore."""
        more = self.verify(rows + EXPLORE_NODES) - self.verify(rows)
        return more < EXPLORE_SHARE * self._unexplored

    def _explore(self, asks: Sequence[Ask], slot: float) -> list[int]:
        """Depths where drafting does not pay: 0, but now and then k for one request that a draft
        may follow, since this may have changed."""
        depths = [0] * len(asks)
        able = [at for at, ask in enumerate(asks) if ask.decodes and ask.left > 0]
        if not able:
            return depths
        cheapest = min(able, key=lambda at: asks[at].missed)
        seconds = slot * asks[cheapest].missed + self._drafting(1, self.k, 0.0)
        if seconds < EXPLORE_SHARE * self._undrafted:
            self._undrafted = 0.0
            depths[cheapest] = min(self.k, asks[cheapest].left)
        return depths

    def _plan(self, load: int, requests: float, found: Sequence[float]) -> Plan:
        """The plan for `requests` of the `load` requests."""
        alone = self._best(load, [(1.0, chance) for chance in sorted(found, reverse=True)], 0.0)
        [nodes] = histogram(1, ((0, chance) for chance in found))
        best = alone._replace(pace=alone.pace / MIN_GAIN)
        deepest = 0
        for depth, expected in enumerate(self.expected, start=1):
            nodes = [known + requests * more for known, more in zip(nodes, expected, strict=True)]
            spent = self._drafting(requests, depth, sum(map(mul, nodes, CHANCES)))
            option = self._best(load, zip(nodes, CHANCES, strict=True), spent)
            if option.pace < best.pace:
                best, deepest = option, depth
        if not deepest:
            return Plan(0, 0.0)
        saved = (alone.pace - best.pace) * best.tokens
        return Plan(deepest, saved / (requests + best.tokens - load))

    def _best(self, load: int, groups: Iterable[tuple[float, float]], spent: float) -> Option:
        """The best option for groups of nodes (number, chance), if drafting takes `spent`."""
        fixed = spent + self.overhead
        rows = tokens = float(load)
        best = Option((self.verify(rows) + fixed) / tokens, 0, tokens)
        min_chance = self._min_chance(load, best)
        for count, (number, chance) in enumerate(groups, start=1):
            if chance < min_chance:
                break
            rows += number
            tokens += number * chance
            pace = (self.verify(rows) + fixed) / tokens
            if pace < best.pace:
                best = Option(pace, count, tokens)
        return best

    def _min_chance(self, load: int, alone: Option) -> float:
        """Nodes that pay save more than their rows cost, at the pace of a round without nodes or a
        better one."""
        return self.verify.min_step(load) / alone.pace

    def _note(self, draft: Draft) -> None:
        """Add the nodes that only the drafter proposed to the expected ones. The depth of the draft
        was chosen before: deeper ones are guessed to go on as those before."""
        depths = draft.depths()
        looked_up = draft.follow(draft.match.tokens)
        rows = [row for row in range(1, len(depths)) if row not in looked_up]
        nodes = [(depths[row] - 1, draft.chances[row - 1]) for row in rows]
        offered = zip(depths[1:], draft.chances, draft.probs, strict=True)
        deepest, last = max((depth, chance) for depth, chance, prob in offered if prob)
        nodes += [(d, last ** ((d + 1) / deepest)) for d in range(deepest, self.k)]
        for expected, now in zip(self.expected, histogram(self.k, nodes), strict=True):
            expected[:] = [a + DRAFT_WEIGHT * (b - a) for a, b in zip(expected, now, strict=True)]

    def _drafting(self, requests: float, k: int, gain: float) -> float:
        """Seconds of the new slots, one or more a request, and of what follows them."""
        first, *deeper = self.passes(requests + gain, [requests] * (k - 1))
        return self.extra + self.draft(first) + sum(map(self.deeper, deeper))
