"""What one pass of training reads: documents packed into a sequence.

Shapes: N tokens, E elements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.methods.base import Elements


class Sequence(NamedTuple):
    """Documents packed one behind the other; all (N,)."""

    ids: Tensor
    supervised: Tensor
    documents: Tensor  # number of the document, ascending

    @property
    def positions(self) -> Tensor:
        """Place of each token in its own document."""
        return torch.arange(len(self.ids), device=self.ids.device) - self.starts

    @property
    def starts(self) -> Tensor:
        """Index of the first token of each token's document."""
        return torch.searchsorted(self.documents, self.documents)


def supervised_elements(sequence: Sequence, elements: Elements) -> Tensor:
    """(E,) bool: the predicted token exists, is supervised, and is in the element's document."""
    predicted = elements.anchor + elements.depth + 2
    last = len(sequence.ids) - 1
    inside, predicted = predicted <= last, predicted.clamp(max=last)
    same = sequence.documents[predicted] == sequence.documents[elements.anchor]
    return inside & same & sequence.supervised[predicted]
