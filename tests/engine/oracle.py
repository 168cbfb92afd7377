"""A proposer that knows the future, errs on purpose, and counts what must be accepted."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from peagle.backends.batch import slots_of
from peagle.engine.draft import Proposer
from peagle.engine.tree import Candidate, Offer, along
from peagle.methods.base import NewSlots
from peagle.model.target import Target


@dataclass
class Oracle:
    """Give `futures`: whole sequences, prompt and true continuation, long enough, all different."""

    futures: list[list[int]] = field(default_factory=list)
    error_rate: float = 0.0
    context: int = 1 << 30  # drafts end here
    hits: dict[int, list[int]] = field(default_factory=dict)  # by future: right tokens, each round
    drafted: int = 0
    _rows: dict[int, int] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(3))

    def propose(self, proposer: Proposer, slots: list[NewSlots], *_: object) -> list[Offer]:
        for new in slots:
            at = torch.tensor(slots_of(new.blocks, new.start, len(new.ids)))
            assert proposer.features.read(at).any(-1).all(), "the target has run every slot"
        return [along([Candidate(token) for token in self._one(new)]) for new in slots]

    def _one(self, new: NewSlots) -> list[int]:
        k, row = new.depth, new.blocks[0]
        if new.start == 0:
            self._rows[row] = self._find(new.ids)
        which = self._rows[row]
        newest = new.start + len(new.ids)  # its position
        future = self.futures[which]
        assert future[new.start + 1 : newest + 1] == new.ids, "slots hold the verified tokens"
        truth = future[newest + 1 : newest + 1 + k]
        assert len(truth) == k, "the oracle must know enough of the future"
        draft = [t ^ 1 if self._random.random() < self.error_rate else t for t in truth]
        seen = min(k, self.context - newest - 1)
        right = next((i for i in range(seen) if draft[i] != truth[i]), seen)
        if seen > 0:
            self.hits.setdefault(which, []).append(right)
            self.drafted += seen
        return draft

    def _find(self, ids: list[int]) -> int:
        found = [i for i, future in enumerate(self.futures) if future[1 : len(ids) + 1] == ids]
        assert len(found) == 1, "prompts must be told apart by their second token on"
        return found[0]

    def accepted(self, which: int, k: int) -> list[int]:
        """Rounds whose i-th draft token had to be accepted."""
        return [sum(right > i for right in self.hits[which]) for i in range(k)]


def end_at(monkeypatch: pytest.MonkeyPatch, target: Target, *tokens: int) -> None:
    """Make tokens end answers."""
    monkeypatch.setattr(target, "end_ids", list(tokens))
