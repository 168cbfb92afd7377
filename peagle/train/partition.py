"""Sequence partitioning: one sequence trained in S passes whose gradients add up to the flat one.

Shapes: N tokens, E elements.

A pass runs the elements it owns, and for context every depth-0 element before them. Example:
N = 6, S = 2, three depths, so positions 0 … 2 and 3 … 5. Segment 0 owns (0,0) (1,0) (2,0) and the
chains whose depth 1 stands at 0 … 2: anchors 0 and 1. Segment 1 owns (3,0) (4,0) and the chains of
anchors 2 … 4, and reads (0,0) (1,0) (2,0) beside them. No chain is ever split.
"""

from typing import NamedTuple

from torch import Tensor

from peagle.methods.base import Elements


class Segment(NamedTuple):
    """Elements of one pass, sorted as the sampler sorts them."""

    elements: Elements
    own: Tensor  # (E,) bool: trained in this pass; the others are context


def partition(elements: Elements, documents: Tensor, segments: int) -> list[Segment]:
    """Assign every element to one of S segments (P-EAGLE paper, Algorithm 1); `documents` is (N,).

    Depths 0 and 1 go by position, with boundaries at multiples of N / S; deeper elements follow
    their parent. Context never leaves the documents a segment owns something of. Segments that own
    nothing are left out.
    """
    assert segments >= 1
    anchor, depth = elements
    position = anchor + depth.clamp(max=1)
    segment = position * segments // len(documents)
    owner = documents[anchor]
    parts = []
    for number in range(segments):
        own = segment == number
        if own.any():
            context = (depth == 0) & (segment < number) & (owner >= owner[own].min())
            keep = own | context
            parts.append(Segment(Elements(anchor[keep], depth[keep]), own[keep]))
    return parts
