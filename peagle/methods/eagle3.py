"""EAGLE-3: a forward for each draft token, fed the token and the hidden state before it.

Shapes: B requests, T slots, E elements, R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from peagle.backends.batch import Batch, Span
from peagle.errors import InputError
from peagle.methods.base import Dialect, DraftPass, DraftStates, DraftSteps, NewSlots, TrainingPass
from peagle.methods.keys import SPECULATORS, mask_ids, speculators_keys
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.model.tensors import pad_rows


class Eagle3:
    """See `Method`."""

    name = "eagle3"
    title = "EAGLE-3"
    parallel = False
    conditional = False
    layers = 1

    def build(self, config: DrafterConfig) -> Drafter:
        if config.correction is not None:
            why = f"{self.name} heads cannot have one, only parallel heads can"
            raise InputError(why, field="correction")
        return Drafter(config)

    def draft(self, inputs: DraftPass) -> DraftSteps:
        """Run real slots for the first token, then a slot a depth, on the token and state before.
        A request whose draft a grammar has ended runs on, and its states are not read."""
        model, cache, slots, features = inputs
        batch = Batch.of([Span(new.blocks, new.start, new.ids) for new in slots])
        out = model.forward(batch, model.drafter.project(features), cache)
        owners = [i for i, new in enumerate(slots) if new.depth]
        rows = (batch.query_lens.cumsum(0) - 1)[owners].to(features.device)
        depth = 0
        while owners:
            tokens = yield DraftStates(owners, out.normed[rows])
            depth += 1
            kept = [at for at, i in enumerate(owners) if slots[i].depth > depth]
            if not kept:
                break
            recurrent = out.recurrent[rows][kept]
            owners = [owners[at] for at in kept]
            spans = [_next_slot(slots[i], depth) for i in owners]
            out = model.forward(Batch.of(spans, tokens[kept]), recurrent, cache)
            rows = torch.arange(len(owners), device=features.device)

    def passes(self, new: float, deeper: Sequence[float]) -> list[float]:
        return [new, *deeper]

    def train_forward(self, drafter: Drafter, inputs: TrainingPass) -> Tensor:
        """Training-time test: depth by depth, each fed the hidden state before it. The last tile of
        a depth is filled with anchor 0."""
        anchor, depth = inputs.elements
        counts = depth.bincount().tolist()
        attend = inputs.attend(counts)
        outputs = list[Tensor]()
        groups = anchor.split(counts)
        anchors = [pad_rows(group) for group in groups]
        feature = drafter.project(inputs.features[anchors[0]])
        for at, (padded, group) in enumerate(zip(anchors, groups, strict=True)):
            positions = inputs.positions[padded] + at
            out = drafter(inputs.ids[padded + 1 + at], feature, positions, attend)
            outputs.append(out.normed[: len(group)])
            if at + 1 < len(groups):
                feature = out.recurrent[torch.searchsorted(group, anchors[at + 1])]
        return torch.cat(outputs)

    def logits(self, drafter: Drafter, normed: Tensor, previous_ids: Tensor | None) -> Tensor:
        return drafter.logits(normed)

    def claims(self, raw: Mapping[str, Any]) -> bool:
        if SPECULATORS in raw:
            return bool(raw[SPECULATORS] == "eagle3")
        return not mask_ids(raw)

    def export(self, config: DrafterConfig, dialect: Dialect) -> dict[str, Any]:
        if dialect != "speculators":
            return {}
        return speculators_keys(config, "eagle3", "Eagle3Speculator")


def _next_slot(new: NewSlots, depth: int) -> Span:
    """The slot of a request that is fed its draft token number `depth`, counted from 1."""
    return Span(new.blocks, new.start + len(new.ids) - 1 + depth, [0])
