"""Drafter and loss of one pass.

Shapes: N tokens, E elements, R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from peagle.methods.registry import method_of
from peagle.model.base_target import TargetOutput
from peagle.model.drafter import Drafter
from peagle.model.tensors import pad_rows
from peagle.train.batches import PackedDocuments
from peagle.train.elements import Segment
from peagle.train.loss import ChunkedDivergence, LossChunk
from peagle.train.passes import logits_of, multiplies_bf16, run_drafter

if TYPE_CHECKING:  # a target is an argument, as a backend is
    from peagle.model.target import Target

LOSS_ROWS = 512  # rows of logits alive at once, on a CPU
LOSS_LOGITS = 1 << 26  # logits alive at once on a GPU, which wants large products


class StepResult(NamedTuple):
    """Sums over the trained elements."""

    loss: Tensor  # scalar, with gradient, each element by its weight; divide by the chains
    correct: Tensor  # (depths,) elements whose most likely token is the document's
    supervised: Tensor  # (depths,) elements


class Trainee(nn.Module):
    """Drafter and loss in one forward: the module that data parallelism wraps."""

    # DDP would send it to all processes at every step, though each has the target's.
    _ddp_params_and_buffers_to_ignore = ("drafter.shared_embedding",)

    def __init__(self, drafter: Drafter, target: "Target", decay: float = 1.0) -> None:
        super().__init__()
        self.drafter = drafter
        self.target = target
        self.decay = decay

    @cached_property
    def target_logits(self) -> Callable[[Tensor], Tensor]:
        """The target's logits over the draft vocabulary. First read when the weights are where they
        stay: a target that is sharded moves."""
        return logits_of(self.target, self.drafter.target_ids)

    def forward(
        self, sequence: PackedDocuments, target_output: TargetOutput, segment: Segment
    ) -> StepResult:
        """`target_output` is `run_target`'s of the sequence."""
        device = sequence.ids.device
        with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bf16(device)):
            normed = run_drafter(self.drafter, sequence, target_output.features, segment.elements)
            return self.compare(sequence, target_output.hidden, segment, normed)

    def compare(
        self, sequence: PackedDocuments, hidden: Tensor, segment: Segment, normed: Tensor
    ) -> StepResult:
        """Loss and accuracy of the segment's trained elements, from the target's hidden states
        (N, E_target) and the drafter's (E, D).

        Element (a, d) is compared with the target's distribution at a + d + 1. Elements are taken
        in the order of that position, so that the target's logits over the draft vocabulary are
        computed once a position, and exist only for a chunk.
        """
        drafter = self.drafter
        positions = segment.elements.anchor + segment.elements.depth + 1
        rows = segment.trained.nonzero()[:, 0]
        rows = rows[positions[rows].argsort(stable=True)]
        positions = positions[rows]
        depth = segment.elements.depth[rows]
        # A chain ends at its first wrong token, so later ones count less often.
        weights = self.decay ** depth.float()

        def chunks() -> Iterator[LossChunk]:
            size = LOSS_ROWS if rows.is_cpu else LOSS_LOGITS // len(drafter.target_ids)
            for some in torch.arange(len(rows), device=rows.device).split(size):
                unique, index = positions[some].unique_consecutive(return_inverse=True)
                logits = self.target_logits(pad_rows(hidden[unique]))[index]
                yield LossChunk(rows[some], sequence.ids[positions[some]], logits, weights[some])

        # Layers have made `normed`; when they are sharded, their parts are elsewhere by now.
        named = drafter.named_parameters()
        parameters = [p for name, p in named if p.requires_grad and not name.startswith("layers.")]
        score = partial(self.score, alone=normed.requires_grad)
        total, best = ChunkedDivergence.apply(score, chunks(), normed, *parameters)
        hit = drafter.target_ids[best] == sequence.ids[positions + 1]
        depths = int(segment.elements.depth.max()) + 1
        correct = depth[hit].bincount(minlength=depths)
        return StepResult(total, correct, depth.bincount(minlength=depths))

    def score(self, normed: Tensor, previous_ids: Tensor, *, alone: bool) -> list[Tensor]:
        """Draft logits (R, V) of hidden states (R, D). A head that is trained together with its
        correction is also compared without it (`alone`), so that it stays good by itself."""
        drafter = self.drafter
        if drafter.correction is None or not alone:
            return [method_of(drafter.config).logits(drafter, normed, previous_ids)]
        plain = drafter.logits(normed)
        return [drafter.correction.apply_to(plain, normed, drafter.embed(previous_ids)), plain]
