"""The documents of each optimizer step: a function of (seed, epoch) alone, so that a resumed run
and any number of processes see the same ones."""

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
        return torch.arange(len(self.ids), device=self.ids.device) - self.starts

    @property
    def starts(self) -> Tensor:
        """Index of the first token of each token's document."""
        return torch.searchsorted(self.documents, self.documents)


class Batches:
    """The endless stream of sequences, each one document or several packed into `pack` tokens."""

    def __init__(self, data: Examples, *, batch: int, pack: int | None, seed: int) -> None:
        self.data = data
        self.lengths = [len(example.ids) for example in data]  # read once: `data` may be on a disk
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
        numbers = self._epoch(epoch)[number - self._starts[epoch]]
        documents = [self.data[i] for i in numbers]
        lengths = torch.tensor([self.lengths[i] for i in numbers])
        ids = torch.tensor([token for d in documents for token in d.ids])
        supervised = torch.tensor([flag for d in documents for flag in d.supervised])
        return PackedDocuments(ids, supervised, torch.tensor(numbers).repeat_interleave(lengths))

    def steps(self, epochs: int) -> int:
        """Optimizer steps of the first `epochs` epochs."""
        return -(-sum(len(self._epoch(epoch)) for epoch in range(epochs)) // self.batch)

    def _epoch_of(self, number: int) -> int:
        while self._starts[-1] <= number:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        return next(i for i, start in enumerate(self._starts) if start > number) - 1

    def _plan(self, epoch: int) -> list[list[int]]:
        """Documents of every sequence of an epoch, packed in a random order; in a sequence they are
        sorted by number."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        plan = list[list[int]]()
        filled = 0
        for index in torch.randperm(len(self.data), generator=generator).tolist():
            if self.pack is None or not plan or filled + self.lengths[index] > self.pack:
                plan.append([])
                filled = 0
            plan[-1].append(index)
            filled += self.lengths[index]
        return [sorted(numbers) for numbers in plan]
