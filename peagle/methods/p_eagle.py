"""P-EAGLE: one forward drafts all tokens, over mask tokens and one learned hidden state.

Shapes: B requests, T slots, E elements, R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.backends.batch import Batch, Span
from peagle.errors import InputError
from peagle.methods.base import Dialect, DraftPass, DraftStates, DraftSteps, TrainingPass
from peagle.methods.keys import SPECULATORS, mask_ids, speculators_keys
from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.model.layers import DrafterOutput
from peagle.model.tensors import pad_rows


class PEagle:
    """See `Method`."""

    name = "p-eagle"
    title = "P-EAGLE"
    parallel = True
    layers = 4
    conditional = False

    def build(self, config: DrafterConfig) -> Drafter:
        if config.mask_token_id is None:
            why = f"is missing, a {self.name} head needs it"
            raise InputError(why, field="mask_token_id", fix="write it as ptd_token_id")
        return Drafter(config)

    def draft(self, inputs: DraftPass) -> DraftSteps:
        """Run real slots, then depth − 1 placeholders of each request, in one forward."""
        model, cache, slots, features = inputs
        drafter = model.drafter
        mask_id = drafter.config.mask_token_id
        assert mask_id is not None
        # The placeholder's feature is projected in the same product.
        projected = drafter.project(torch.cat([features, drafter.mask_hidden[None]]))
        *reals, placeholder = projected.split([*(len(new.ids) for new in slots), 1])
        parts = list[Tensor]()
        spans = list[Span]()
        owners = list[int]()  # the request of each draft token
        predicting = list[int]()  # and the row that predicts it
        rows = 0
        for request, (new, real) in enumerate(zip(slots, reals, strict=True)):
            placeholders = max(0, new.depth - 1)
            parts += [real, placeholder.expand(placeholders, -1)]
            spans.append(Span(new.blocks, new.start, [*new.ids, *[mask_id] * placeholders]))
            rows += len(new.ids) + placeholders
            predicting += range(rows - new.depth, rows)
            owners += [request] * new.depth
        normed = model.forward(Batch.of(spans), torch.cat(parts), cache).normed
        if owners:
            yield DraftStates(owners, normed[predicting])

    def passes(self, new: float, deeper: Sequence[float]) -> list[float]:
        return [new + sum(deeper)]

    def train_forward(self, drafter: Drafter, inputs: TrainingPass) -> Tensor:
        """All elements in one forward: real inputs at depth 0, placeholders at the others."""
        mask_id = drafter.config.mask_token_id
        assert mask_id is not None
        anchor, depth = inputs.elements
        count = len(anchor)
        real = anchor[depth == 0]
        projected = drafter.project(pad_rows(inputs.features[real]))[: len(real)]
        positions = pad_rows(inputs.positions[anchor] + depth)
        placeholders = drafter.placeholders(len(positions) - len(real))
        ids = F.pad(inputs.ids[real + 1], (0, len(placeholders)), value=mask_id)
        features = torch.cat([projected, placeholders])
        out: DrafterOutput = drafter(ids, features, positions, inputs.attend([count]))
        return out.normed[:count]

    def logits(self, drafter: Drafter, normed: Tensor, previous_ids: Tensor | None) -> Tensor:
        logits = drafter.logits(normed)
        if drafter.correction is None or previous_ids is None:
            return logits
        return drafter.correction.apply_to(logits, normed, drafter.embed(previous_ids))

    def claims(self, raw: Mapping[str, Any]) -> bool:
        if SPECULATORS in raw:
            return bool(raw[SPECULATORS] == "peagle")
        return bool(mask_ids(raw))

    def export(self, config: DrafterConfig, dialect: Dialect) -> dict[str, Any]:
        if dialect != "speculators":
            return {"ptd_token_id": config.mask_token_id, "parallel_drafting": True}
        if config.fc_norm:
            why = "vLLM drops fc_norm of speculators' peagle heads"
            raise InputError(why, field="to", value="speculators", fix="choose vllm")
        keys = speculators_keys(config, "peagle", "PEagleSpeculator")
        return keys | {"mask_token_id": config.mask_token_id}
