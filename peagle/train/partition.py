"""Sequence partitioning: one sequence trained in S passes whose gradients add up to the flat one.

Shapes: N tokens, E elements.

A pass runs the elements it owns, and for context every depth-0 element before them. Example:
N = 6, S = 2, three depths, so anchors 0 … 2 and 3 … 5. Segment 0 owns the chains of anchors 0, 1
and 2, such as (2,0) (2,1) (2,2). Segment 1 owns those of 3 and 4, and reads (0,0) (1,0) (2,0), too.
No chain is ever split.
"""

from typing import NamedTuple

from torch import Tensor

from peagle.methods.base import Elements


class Segment(NamedTuple):
    """Elements of one pass, sorted as the sampler sorts them."""

    elements: Elements
    own: Tensor  # (E,) bool: trained in this pass; the others are context


def partition(elements: Elements, documents: Tensor, segments: int) -> list[Segment]:
    """Assign every chain to one of S segments; `documents` is (N,).

    Chains go by anchor, with boundaries at multiples of N / S. (The P-EAGLE paper's Algorithm 1
    parts depth 0 from the rest of a chain at a boundary; the gradients add up to the same.) Context
    never leaves the documents a segment owns something of. Segments that own nothing are left out.
    """
    assert segments >= 1
    anchor, depth = elements
    segment = anchor * segments // len(documents)
    owner = documents[anchor]
    parts = []
    for number in range(segments):
        own = segment == number
        if own.any():
            context = (depth == 0) & (segment < number) & (owner >= owner[own].min())
            keep = own | context
            parts.append(Segment(Elements(anchor[keep], depth[keep]), own[keep]))
    return parts
