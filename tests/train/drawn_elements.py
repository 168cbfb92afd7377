"""Elements of random documents, as training draws them."""

import torch
from torch import Tensor

from peagle.methods.base import Elements
from peagle.train.elements import sample_elements

CASES = [(10, 1, 1), (24, 4, 2), (40, 8, 3), (150, 6, 4), (2, 3, 5)]  # tokens, depths, seed


def elements_of(tokens: int, depths: int, seed: int) -> tuple[Elements, Tensor]:
    """Elements, and the document of each token."""
    g = torch.Generator().manual_seed(seed)
    supervised = torch.rand(tokens, generator=g) < 0.8
    documents = (torch.rand(tokens, generator=g) < 0.05).cumsum(0)
    return sample_elements(supervised, documents, depths, 0.7, g), documents
