"""Sequence partitioning: one sequence trained in S passes whose gradients add up to the flat one.

Shapes: N tokens, E elements.

A pass trains the elements of its anchors, and for context runs every depth-0 element up to them.
Example: N = 6, S = 2, three depths, all tokens supervised, so anchors 0 … 2 and 3 … 5. Segment 0
trains the chains of anchors 0, 1 and 2, such as (2,0) (2,1) (2,2). Segment 1 trains (3,0) (3,1),
and runs (0,0) (1,0) (2,0) (4,0), too. No chain is ever split.
"""

from typing import NamedTuple

from torch import Tensor

from peagle.methods.base import Elements
from peagle.train.batches import PackedDocuments


class Segment(NamedTuple):
    """Elements of one pass, sorted as the sampler sorts them."""

    elements: Elements
    trained: Tensor  # (E,) bool: in this pass; the others are context


def one_pass(sequence: PackedDocuments, elements: Elements) -> Segment:
    """All sampled elements. Trained are those whose predicted token exists, is supervised and in
    the document of the element."""
    last = len(sequence.ids) - 1
    predicted = elements.anchor + elements.depth + 2
    inside = predicted <= last
    predicted = predicted.clamp(max=last)
    same = sequence.documents[predicted] == sequence.documents[elements.anchor]
    return Segment(elements, inside & same & sequence.supervised[predicted])


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
