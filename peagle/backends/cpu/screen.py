"""The largest logits of rows, exactly, by about half the bytes of an output head.

All its weights are read rounded to int8. What may then hold a row's largest logit is computed from
the weights as they are. A rounded weight is off by half its scale at most, so the logit of hidden
state h and output v is off by at most Σ|h| · scale[v] / 2. Where inputs are rounded to bytes, too,
that adds |what h lost| · |weights of v|, by Cauchy and Schwarz.

Shapes: R rows, E hidden, V vocabulary.
"""

from functools import cached_property

import torch
from torch import Tensor

from peagle.backends.cpu.matrix import CHUNK, GROUP, PANEL, CpuLinear
from peagle.backends.cpu.ranking import CpuRanking

MIN_WEIGHTS = 2**26  # of fewer, all are read about as fast
MAX_ROWS = 16  # of more, all logits are as fast
MAX_NEAR = 1 / 16  # of the outputs, likewise
SAFE = 1.01  # times a bound, for how it is rounded itself


def fits_screen(head: Tensor) -> bool:
    """Whether it pays for weights (V, E), and they are whole panels of whole groups."""
    outputs, inputs = head.shape
    return head.numel() >= MIN_WEIGHTS and outputs % PANEL == 0 and inputs % GROUP == 0


class Screen:
    """The largest logits by an output head and its copy in int8."""

    def __init__(self, head: CpuLinear, rounded: CpuLinear) -> None:
        assert rounded.weights.scales is not None
        self.head = head
        self.rounded = rounded
        self.scales = rounded.weights.scales.float()  # (V,)

    @cached_property
    def norms(self) -> Tensor:
        """(V,) lengths of the rounded weights, at most."""
        norms = torch.cat([part.float().norm(dim=1) for part in self.head.weight.split(CHUNK)])
        return norms + self.scales * self.head.in_features**0.5 / 2

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, E) → (R, V): the largest of each row as by the head, all others smaller than that."""
        if len(hidden) > MAX_ROWS:
            return self.head(hidden)
        logits: Tensor = self.rounded(hidden)
        inputs = hidden.float()
        # The sums of both products are rounded, too: twice what that may lose.
        spreads = inputs.abs().sum(1) * (0.5 + inputs.shape[1] * 2**-15)
        near = torch.zeros(logits.shape[1], dtype=torch.bool)
        best = CpuRanking().best(logits)[1].tolist()
        losses = self._losses(inputs)
        for row, at, spread, lost in zip(logits, best, spreads.tolist(), losses, strict=True):
            upper = row.to(torch.float32, copy=True)
            upper.add_(upper.abs(), alpha=torch.finfo(row.dtype).eps)
            upper.add_(self.scales, alpha=SAFE * spread)
            if lost:
                upper.add_(self.norms, alpha=SAFE * lost)
            least = 2 * row[at] - upper[at]
            near |= upper >= least
        ids = near.nonzero()[:, 0]
        if len(ids) > MAX_NEAR * len(near):
            return self.head(hidden)
        if len(ids):  # none where all are NaN
            logits[:, ids] = self.head.some(hidden, ids)
        return logits

    def _losses(self, inputs: Tensor) -> list[float]:
        """Lengths of what rounding to bytes takes from rows (R, E)."""
        if self.rounded.weights.tiled:
            return [0.0] * len(inputs)
        groups = inputs.unflatten(1, (-1, GROUP))
        tiny = torch.finfo(inputs.dtype).tiny
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=tiny)
        rest = groups - (groups / scale).round() * scale
        losses: list[float] = rest.flatten(1).norm(dim=1).tolist()
        return losses
