"""Elements of random documents, as training draws them."""

from typing import cast

import torch
from torch import Tensor

from peagle.methods.base import Elements
from peagle.train.attention import sees
from peagle.train.elements import sample_elements

CASES = [(10, 1, 1), (24, 4, 2), (40, 8, 3), (150, 6, 4), (2, 3, 5)]  # tokens, depths, seed


def by_depth(elements: Elements) -> list[int]:
    """Counts of elements of EAGLE-3's forwards."""
    return cast(list[int], elements.depth.bincount().tolist())


def elements_of(tokens: int, depths: int, seed: int) -> tuple[Elements, Tensor]:
    """Elements, and the document of each token."""
    g = torch.Generator().manual_seed(seed)
    supervised = torch.rand(tokens, generator=g) < 0.8
    documents = (torch.rand(tokens, generator=g) < 0.05).cumsum(0)
    return sample_elements(supervised, documents, depths, 0.7, g).elements, documents


def visible(elements: Elements, documents: Tensor, window: int | None = None) -> Tensor:
    """Dense mask (E, E) bool; `documents` (N,) is the document of each token."""
    each = torch.arange(len(elements.anchor), device=elements.anchor.device)
    return sees(elements, documents[elements.anchor], window, each[:, None], each)
