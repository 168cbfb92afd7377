"""Conditional drop-token (COD) sampling: which (anchor, depth) elements of a document are trained.

Shapes: N tokens, E elements.

Element (a, d) is the slot d positions after the one with token x[a+1] and feature h[a]; it predicts
x[a+d+2]. Example: N = 8, x[4:] supervised, r = 0.5, three depths. Depth 0 keeps every anchor,
0 … 6. Candidates at depth 0 are 2 … 5 (they predict x[4] … x[7]). Depth 1 draws two of those whose
x[a+3] exists, 2 … 4: say 2 and 4. Depth 2 draws one of these whose x[a+4] exists: 2. So every chain
is closed: an anchor at depth d is at every depth before it.
"""

import torch
from torch import Tensor

from peagle.methods.base import Elements


def sample_elements(
    supervised: Tensor,  # (N,) bool: x[i] is an answer token
    documents: Tensor,  # (N,) int: document of x[i]
    depths: int,
    ratio: float,
    generator: torch.Generator,
) -> Elements:
    """Draw the elements of a packed sequence (P-EAGLE paper, COD).

    Depth 0 keeps every anchor, for context; its candidates are those whose predicted token is
    supervised and in their document. Depth d keeps ratio^d · (candidates at depth 0) anchors, or
    all there are: candidates at d−1 whose predicted token at d is supervised and in
    their document, too. ratio 1 keeps everything: EAGLE-3's training-time test.
    """
    tokens = len(supervised)
    assert tokens >= 2, "a document needs two tokens"
    kept = torch.zeros(depths, tokens, dtype=torch.bool, device=documents.device)
    kept[0, :-1] = documents[1:] == documents[:-1]
    candidates = _predicts(kept[0], 0, supervised, documents)
    population = int(candidates.sum())
    for depth in range(1, depths):
        pool = _predicts(candidates, depth, supervised, documents).nonzero()[:, 0]
        size = min(len(pool), round(ratio**depth * population))
        chosen = torch.randperm(len(pool), generator=generator)[:size]
        kept[depth, pool[chosen.to(pool.device)]] = True
        candidates = kept[depth]
    depth_of, anchors = kept.nonzero().unbind(-1)
    return Elements(anchors.contiguous(), depth_of.contiguous())


def _predicts(anchors: Tensor, depth: int, supervised: Tensor, documents: Tensor) -> Tensor:
    """Anchors (bool, by token) whose predicted token x[a + depth + 2] is supervised and in their
    document. Cut after the last anchor whose token exists."""
    predicted = supervised[depth + 2 :]
    room = len(predicted)
    return anchors[:room] & predicted & (documents[depth + 2 :] == documents[:room])
