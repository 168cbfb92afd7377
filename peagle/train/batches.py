"""The documents of each optimizer step: a function of (seed, epoch) alone, so that a resumed run
and any number of processes see the same ones."""

from array import array
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from peagle.data.example import Examples


class PackedDocuments(NamedTuple):
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
        starts = torch.searchsorted(self.documents, self.documents)
        return torch.arange(len(self.ids), device=self.ids.device) - starts


class Epoch(NamedTuple):
    """Documents of an epoch, and where each sequence of them begins and the last one ends."""

    documents: "array[int]"
    bounds: "array[int]"


class Batches:
    """The endless stream of sequences, each one document or several packed into `pack` tokens."""

    def __init__(self, data: Examples, *, batch: int, pack: int | None, seed: int) -> None:
        self.data = data
        # Counted once: `data` may be on a disk.
        self.lengths = array("q", (len(example.ids) for example in data))
        self.answer_tokens = sum(sum(example.supervised) for example in data)  # of an epoch
        self.batch = batch
        self.pack = pack
        self.seed = seed
        self._epoch = lru_cache(maxsize=2)(self._plan)
        self._starts = [0]  # first sequence of every epoch seen so far

    def numbers(self, step: int) -> range:
        """Sequences of a step, counted from the start of training."""
        return range(step * self.batch, (step + 1) * self.batch)

    def sequence(self, number: int) -> PackedDocuments:
        """Sequence `number` of the stream."""
        epoch = self._epoch_of(number)
        order, bounds = self._epoch(epoch)
        at = number - self._starts[epoch]
        numbers = sorted(order[bounds[at] : bounds[at + 1]])
        documents = [self.data[i] for i in numbers]
        lengths = torch.tensor([self.lengths[i] for i in numbers])
        ids = torch.tensor([token for d in documents for token in d.ids])
        supervised = torch.tensor([flag for d in documents for flag in d.supervised])
        return PackedDocuments(ids, supervised, torch.tensor(numbers).repeat_interleave(lengths))

    def sequences(self, epochs: int) -> int:
        """Count of sequences in the first `epochs` epochs."""
        return sum(len(self._epoch(epoch).bounds) - 1 for epoch in range(epochs))

    def _epoch_of(self, number: int) -> int:
        while self._starts[-1] <= number:
            sequences = len(self._epoch(len(self._starts) - 1).bounds) - 1
            self._starts.append(self._starts[-1] + sequences)
        return bisect_right(self._starts, number) - 1

    def _plan(self, epoch: int) -> Epoch:
        """Pack the documents in a random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self.data), generator=generator)
        order = array("q", shuffled.numpy().tobytes())
        bounds = array("q")
        filled = 0
        for at, index in enumerate(order):
            if self.pack is None or not bounds or filled + self.lengths[index] > self.pack:
                bounds.append(at)
                filled = 0
            filled += self.lengths[index]
        bounds.append(len(order))
        return Epoch(order, bounds)
