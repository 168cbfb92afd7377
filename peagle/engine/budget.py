"""The depth of drafts and the number of nodes to verify. No torch here.

A `Budget` does the same in every round; `adaptive.py` has one that minimises the time per token.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from peagle.engine.tree import Draft

PRIOR_WEIGHT = 8.0  # expected tokens that a depth's calibration begins with
KEPT_WEIGHT = 0.999  # weight that earlier rounds keep in a calibration, each round


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
            if not probs:  # lookup's nodes tell nothing about the head
                continue
            hits = sum(child in path for child in probs)
            expected, accepted = self._sums[depth]
            expected = expected * KEPT_WEIGHT + sum(probs.values())
            self._sums[depth] = (expected, accepted * KEPT_WEIGHT + hits)


class Ask(NamedTuple):
    """A request that may be drafted for."""

    missed: int  # slots that the drafter must run first
    left: int  # tokens that it may emit after its next one, which needs no draft
    decodes: bool = True  # False: its prompt is still being read, and no draft follows this round


class Round(NamedTuple):
    """The costs of a round that only decoded, in seconds."""

    rows: int  # of the target's forward
    drafter_rows: list[float]  # of each of the drafter's forwards
    verifying: float
    drafting: float
    overhead: float  # outside both models


class Budget:
    """Drafts `k` tokens deep and verifies every node, whatever it costs."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.calibration = Calibration()

    def choose(self, load: int, asks: Sequence[Ask], found: Sequence[float]) -> list[int]:
        """Draft depth of each request that goes on, 0 to k.

        `load`: requests that decode, or will as soon as their prompts have run. `found`: chances of
        the nodes that lookup proposes.
        """
        return [self.k] * len(asks)

    def min_chance(self, load: int, spent: float) -> float:
        """The chance below which no node is verified, after `spent` seconds of drafting."""
        return 0.0

    def keep(self, load: int, drafts: Sequence[Draft], spent: float) -> list[int]:
        """The number of nodes to verify of each draft, the likeliest first.

        `spent`: seconds that drafting took.
        """
        return [len(draft) for draft in drafts]

    def learn(self, costs: Round) -> None:
        """Correct the costs by those of a round."""
