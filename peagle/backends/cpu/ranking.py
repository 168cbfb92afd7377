"""The largest logits of rows, by native code.

Shapes: R rows, V vocabulary, C candidates.
"""

import torch
from torch import Tensor

from peagle.backends.cpu.library import load
from peagle.backends.ranking import Ranking


class CpuRanking(Ranking):
    """See `Ranking`; in a third of the time, and without a team of torch's."""

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = _rank(logits, 1, probabilities=False)
        return values[:, 0], ids[:, 0]

    def likeliest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return _rank(logits, count, probabilities=True)


def _rank(logits: Tensor, count: int, *, probabilities: bool) -> tuple[Tensor, Tensor]:
    """Values (R, C) float32 and indices (R, C) int64 of the largest logits (R, V)."""
    logits = logits.contiguous()
    rows, width = logits.shape
    values = torch.empty(rows, count)
    ids = torch.empty(rows, count, dtype=torch.int64)
    sizes = (rows, width, count, probabilities)
    pointers = (values.data_ptr(), ids.data_ptr())
    rank = load().function("rank", logits.dtype)
    rank(logits.data_ptr(), *sizes, *pointers, torch.get_num_threads())
    return values, ids
