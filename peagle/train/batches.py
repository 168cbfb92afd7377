"""Which documents each optimizer step trains on: a function of (seed, epoch) alone, so that a
resumed run and any number of processes see the same ones."""

from functools import lru_cache

import torch

from peagle.data.example import Example
from peagle.train.sequence import Sequence


class Batches:
    """The endless stream of sequences, each one document or several packed into `pack` tokens."""

    def __init__(self, data: list[Example], *, batch: int, pack: int | None, seed: int) -> None:
        self.data, self.batch, self.pack, self.seed = data, batch, pack, seed
        self._epoch = lru_cache(maxsize=2)(self._plan)
        self._starts = [0]  # first sequence of every epoch seen so far

    def numbers(self, step: int) -> range:
        """Sequences of a step, counted from the start of training."""
        return range(step * self.batch, (step + 1) * self.batch)

    def sequence(self, number: int) -> Sequence:
        """Sequence `number` of the stream."""
        documents = [self.data[i] for i in self.documents(number)]
        ids = torch.tensor([token for d in documents for token in d.ids])
        supervised = torch.tensor([flag for d in documents for flag in d.supervised])
        lengths = torch.tensor([len(d.ids) for d in documents])
        return Sequence(ids, supervised, torch.arange(len(documents)).repeat_interleave(lengths))

    def answer_tokens(self, number: int) -> int:
        """Supervised tokens of a sequence."""
        return sum(sum(self.data[i].supervised) for i in self.documents(number))

    def documents(self, number: int) -> list[int]:
        """Which documents of the data are packed into a sequence."""
        epoch = self._epoch_of(number)
        return self._epoch(epoch)[number - self._starts[epoch]]

    def steps(self, epochs: int) -> int:
        """Optimizer steps of some epochs."""
        return -(-sum(len(self._epoch(epoch)) for epoch in range(epochs)) // self.batch)

    def _epoch_of(self, number: int) -> int:
        while self._starts[-1] <= number:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        return next(i for i, start in enumerate(self._starts) if start > number) - 1

    def _plan(self, epoch: int) -> list[list[int]]:
        """Documents of every sequence of an epoch, packed in their random order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        plan, filled = list[list[int]](), 0
        for index in torch.randperm(len(self.data), generator=generator).tolist():
            length = len(self.data[index].ids)
            if self.pack is None or not plan or filled + length > self.pack:
                plan.append([])
                filled = 0
            plan[-1].append(index)
            filled += length
        return plan
