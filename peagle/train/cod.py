"""Conditional drop-token (COD) sampling: which (anchor, depth) elements of a document are trained.

Shapes: N tokens, E elements.

Element (a, d) is the slot d places after the slot with token x[a+1] and feature h[a]; it predicts
x[a+d+2]. Example: N = 8, x[4:] supervised, r = 0.5, three depths. Depth 0 keeps every anchor,
0 … 6. Candidates at depth 0 are 2 … 5 (they predict x[4] … x[7]). Depth 1 draws two of the anchors
1 … 4 (predicting x[4] … x[7]), say 1 and 4; depth 2 draws one of those whose x[a+4] is supervised:
1. So every chain is closed: whoever is at depth d is at every depth before it.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Elements(NamedTuple):
    """Training elements, sorted by depth, then anchor; both (E,) int64."""

    anchor: Tensor
    depth: Tensor

    def at(self, depth: int) -> Tensor:
        """Indices of the elements at one depth (ascending anchors)."""
        return (self.depth == depth).nonzero()[:, 0]


def sample_elements(
    supervised: Tensor,  # (N,) bool: x[i] is an answer token
    documents: Tensor,  # (N,) int: document of x[i]
    depths: int,
    ratio: float,
    floor: float,
    generator: torch.Generator,
) -> Elements:
    """Draw the elements of a packed sequence (P-EAGLE paper, COD).

    Depth 0 keeps every anchor; depth d keeps max(ratio^d, floor) · (candidates at depth 0) anchors,
    at most as many as there are: anchors kept at d−1 whose predicted token is supervised and in
    their document. ratio 1 keeps everything: EAGLE-3's training-time test.
    """
    assert len(supervised) >= 2, "a document needs two tokens"
    anchors = (documents[1:] == documents[:-1]).nonzero()[:, 0]
    kept, pool = [anchors], anchors
    population = len(_candidates(pool, 0, supervised, documents))
    for depth in range(1, depths):
        pool = _candidates(pool, depth, supervised, documents)
        size = min(len(pool), round(max(ratio**depth, floor) * population))
        chosen = torch.randperm(len(pool), generator=generator)[:size].sort().values
        pool = pool[chosen.to(pool.device)]
        kept.append(pool)
    depth_of = [torch.full_like(part, depth) for depth, part in enumerate(kept)]
    return Elements(torch.cat(kept), torch.cat(depth_of))


def _candidates(anchors: Tensor, depth: int, supervised: Tensor, documents: Tensor) -> Tensor:
    """Anchors whose predicted token x[a + depth + 2] is supervised and in their document."""
    anchors = anchors[anchors + depth + 2 < len(supervised)]
    predicted = anchors + depth + 2
    return anchors[supervised[predicted] & (documents[predicted] == documents[anchors])]
