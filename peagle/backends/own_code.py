"""Models that run the code they come with, over a backend's attention. The smallest backend has
nothing else.

Shapes: T rows, E target hidden, F feature layers, D drafter hidden, R rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from peagle.model.attention import Attend
from peagle.model.base_target import BaseTarget, TargetOutput
from peagle.model.layers import DrafterOutput

if TYPE_CHECKING:
    from peagle.backends.batch import Batch
    from peagle.backends.kv_cache import KVCache
    from peagle.model.drafter import Drafter
    from peagle.model.target import Target

MakeAttend = Callable[["Batch", "KVCache"], Attend]  # called once for each forward


class OwnCodeTarget:
    """A `TargetModel` that runs the target's own code."""

    def __init__(self, target: BaseTarget, attend: MakeAttend) -> None:
        self.target = cast("Target", target)  # described ones run in native code
        self.attend = attend

    def forward(self, batch: "Batch", cache: "KVCache", taps: Sequence[int]) -> TargetOutput:
        """As `TargetModel.forward`."""
        ids, positions = (part.to(cache.device) for part in (batch.ids, batch.positions))
        return self.target.forward(ids, positions, self.attend(batch, cache), taps)

    def logits(self, hidden: Tensor, *, largest: bool = False) -> Tensor:  # noqa: ARG002
        """As `TargetModel.logits`."""
        return self.target.logits(hidden)


@dataclass(eq=False)
class OwnCodeDrafter:
    """A `DrafterModel` that runs the drafter's own code."""

    drafter: "Drafter"
    attend: MakeAttend

    @torch.no_grad()
    def forward(self, batch: "Batch", features: Tensor, cache: "KVCache") -> DrafterOutput:
        """As `DrafterModel.forward`."""
        ids, positions = (part.to(cache.device) for part in (batch.ids, batch.positions))
        out: DrafterOutput = self.drafter(ids, features, positions, self.attend(batch, cache))
        return out
