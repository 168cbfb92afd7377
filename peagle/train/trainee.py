"""Drafter and loss of one pass.

Shapes: N tokens, E elements, R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.methods.registry import method_of
from peagle.model.drafter import Drafter
from peagle.model.padding import pad_rows
from peagle.model.target import Target, TargetOutput
from peagle.train.drafter_pass import run_drafter
from peagle.train.loss import ChunkedDivergence, LossChunk
from peagle.train.partition import Segment
from peagle.train.sequence import Sequence, supervised_elements
from peagle.train.target_pass import logits_of

LOSS_ROWS = 512  # rows of logits alive at once, on a CPU
LOSS_LOGITS = 1 << 26  # logits alive at once on a GPU, which wants large products


class StepResult(NamedTuple):
    """Sums over the elements trained."""

    loss: Tensor  # scalar, with gradient, each element by its weight; divide by the chains
    correct: Tensor  # (depths,) elements whose most likely token is the document's
    supervised: Tensor  # (depths,) elements


class Trainee(nn.Module):
    """Drafter and loss in one forward: what data parallelism wraps."""

    def __init__(
        self, drafter: Drafter, target: Target, decay: float = 1.0, *, bf16: bool = True
    ) -> None:
        super().__init__()
        self.drafter, self.target, self.bf16 = drafter, target, bf16
        self.decay = decay
        # Made when the weights are where they stay: a target that is sharded moves.
        self.target_logits: Callable[[Tensor], Tensor] | None = None

    def forward(self, sequence: Sequence, said: TargetOutput, segment: Segment) -> StepResult:
        """`said` is `run_target`'s view of the sequence."""
        with torch.autocast(sequence.ids.device.type, torch.bfloat16, enabled=self.bf16):
            normed = run_drafter(self.drafter, sequence, said.features, segment.elements)
            return self.compare(sequence, said.hidden, segment, normed)

    def compare(
        self, sequence: Sequence, hidden: Tensor, segment: Segment, normed: Tensor
    ) -> StepResult:
        """Loss and accuracy of every supervised element the segment owns, from the target's hidden
        states (N, E_target) and the drafter's (E, D).

        Element (a, d) is compared with the target's distribution at a + d + 1. Elements are taken
        in the order of that position, so that the target's logits over the draft vocabulary are
        computed once a position, and exist only for a chunk.
        """
        drafter = self.drafter
        if self.target_logits is None:
            self.target_logits = logits_of(self.target, drafter.target_ids)
        target_logits = self.target_logits
        anchor, depth = segment.elements
        trained = segment.own & supervised_elements(sequence, segment.elements)
        chosen = trained.nonzero()[:, 0]
        chosen = chosen[(anchor + depth)[chosen].argsort(stable=True)]
        at = (anchor + depth + 1)[chosen]
        # A chain ends at its first wrong token, so later ones count less often.
        weights = self.decay ** depth[chosen].float()

        def chunks() -> Iterator[LossChunk]:
            size = LOSS_ROWS if chosen.is_cpu else LOSS_LOGITS // len(drafter.target_ids)
            split = (each.split(size) for each in (chosen, at, weights))
            for rows, positions, of_rows in zip(*split, strict=True):
                unique, index = positions.unique_consecutive(return_inverse=True)
                logits = target_logits(pad_rows(hidden[unique]))
                yield LossChunk(rows, sequence.ids[positions], logits[index], of_rows)

        # Layers have made `normed`; when they are sharded, their parts are elsewhere by now.
        named = drafter.named_parameters()
        parameters = [p for name, p in named if p.requires_grad and not name.startswith("layers.")]
        score = partial(self.score, alone=normed.requires_grad)
        total, best = ChunkedDivergence.apply(score, chunks(), normed, *parameters)
        hit = drafter.target_ids[best] == sequence.ids[at + 1]
        seen = depth[chosen]
        count = partial(torch.bincount, minlength=int(depth.max()) + 1)
        return StepResult(total, count(seen[hit]), count(seen))

    def score(self, normed: Tensor, previous_ids: Tensor, *, alone: bool) -> list[Tensor]:
        """Draft logits (R, V) of hidden states (R, D). A head that is trained together with its
        correction is also compared without it (`alone`), so that it stays good by itself."""
        drafter = self.drafter
        if drafter.correction is None or not alone:
            return [method_of(drafter.config).logits(drafter, normed, previous_ids)]
        plain = drafter.logits(normed)
        return [drafter.correction.apply_to(plain, normed, drafter.embed(previous_ids)), plain]
