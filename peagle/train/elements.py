"""Training elements: the (anchor, depth) of a document that are trained, by conditional drop-token
(COD) sampling, and their partition into passes whose gradients add up to the flat one.

Shapes: N tokens, E elements.

Element (a, d) is the slot d positions after the one with token x[a+1] and feature h[a]; it predicts
x[a+d+2]. Example: N = 8, x[4:] supervised, r = 0.5, three depths. Depth 0 keeps every anchor,
0 … 6. Candidates at depth 0 are 2 … 5 (they predict x[4] … x[7]). Depth 1 draws two of those whose
x[a+3] exists, 2 … 4: say 2 and 4. Depth 2 draws one of these whose x[a+4] exists: 2. So every chain
is closed: an anchor at depth d is at every depth before it.

A pass trains the elements of its anchors, and for context runs every depth-0 element up to them.
Example: N = 6, S = 2 passes, three depths, all tokens supervised, so anchors 0 … 2 and 3 … 5.
Segment 0 trains the chains of anchors 0, 1 and 2, such as (2,0) (2,1). Segment 1 trains (3,0), and
runs (0,0) (1,0) (2,0) (4,0), too. No chain is ever split.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.methods.base import Elements


class Segment(NamedTuple):
    """Elements of one pass, sorted as the sampler sorts them."""

    elements: Elements
    trained: Tensor  # (E,) bool: in this pass; the others are context


def sample_elements(
    supervised: Tensor,  # (N,) bool: x[i] is an answer token
    documents: Tensor,  # (N,) int: document of x[i]
    depths: int,
    ratio: float,
    generator: torch.Generator,
) -> Segment:
    """Draw the elements of a packed sequence (P-EAGLE paper, COD), for one pass.

    Depth 0 keeps every anchor, for context, and trains its candidates: those whose predicted token
    is supervised and in their document. Depth d keeps ratio^d · (candidates at depth 0) anchors, or
    all there are: candidates at d−1 whose predicted token at d is supervised and in
    their document, too. ratio 1 keeps everything: EAGLE-3's training-time test.
    """
    tokens = len(supervised)
    assert tokens >= 2, "a document needs two tokens"
    kept = torch.zeros(depths, tokens, dtype=torch.bool, device=documents.device)
    kept[0, :-1] = documents[1:] == documents[:-1]
    candidates = _predicts(kept[0], 0, supervised, documents)
    first = candidates.nonzero()[:, 0]
    for depth in range(1, depths):
        pool = _predicts(candidates, depth, supervised, documents).nonzero()[:, 0]
        size = min(len(pool), round(ratio**depth * len(first)))
        chosen = torch.randperm(len(pool), generator=generator)[:size]
        kept[depth, pool[chosen.to(pool.device)]] = True
        candidates = kept[depth]
    depth_of, anchors = kept.nonzero().unbind(-1)
    trained = (depth_of > 0) | torch.isin(anchors, first)
    return Segment(Elements(anchors.contiguous(), depth_of.contiguous()), trained)


def _predicts(anchors: Tensor, depth: int, supervised: Tensor, documents: Tensor) -> Tensor:
    """Anchors (bool, by token) whose predicted token x[a + depth + 2] is supervised and in their
    document. Cut after the last anchor whose token exists."""
    predicted = supervised[depth + 2 :]
    room = len(predicted)
    return anchors[:room] & predicted & (documents[depth + 2 :] == documents[:room])


def partition(whole: Segment, documents: Tensor, segments: int) -> list[Segment]:
    """Assign every trained chain of one pass to one of S segments; `documents` is (N,).

    Chains go by anchor, with boundaries at multiples of N / S. (The P-EAGLE paper's Algorithm 1
    parts depth 0 from the rest of a chain at a boundary; the gradients add up to the same.) Context
    never leaves the documents of a segment's trained elements. Segments that train nothing are left
    out.
    """
    assert segments >= 1
    anchor, depth = whole.elements
    segment = anchor * segments // len(documents)
    owner = documents[anchor]
    parts = []
    for number in range(segments):
        trained = whole.trained & (segment == number)
        if trained.any():
            context = (depth == 0) & (segment <= number) & (owner >= owner[trained].min())
            keep = trained | context
            parts.append(Segment(Elements(anchor[keep], depth[keep]), trained[keep]))
    return parts
