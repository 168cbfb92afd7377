"""A sequence of training: documents one after another."""

from typing import NamedTuple, cast

import torch
from torch import Tensor


class Sequence(NamedTuple):
    """Documents packed one after another; all (N,)."""

    ids: Tensor
    supervised: Tensor  # bool
    documents: Tensor  # number of each token's document in the data, ascending

    @property
    def numbers(self) -> list[int]:
        """Its documents, by their number in the data."""
        return cast(list[int], self.documents.unique_consecutive().tolist())

    @property
    def positions(self) -> Tensor:
        """Index of each token in its document."""
        return torch.arange(len(self.ids), device=self.ids.device) - self.starts

    @property
    def starts(self) -> Tensor:
        """Index of the first token of each token's document."""
        return torch.searchsorted(self.documents, self.documents)
