"""The protocol of a backend, which runs whole models over a KV cache. An LLM has one.

Shapes: T rows, E target hidden, F feature layers, D drafter hidden, R rows, V vocabulary.

To add one, see docs/adding-a-backend.md.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.kv_cache import KVCache
from peagle.model.base_target import BaseTarget, TargetOutput
from peagle.model.drafter import Drafter
from peagle.model.layers import DrafterOutput


class TargetModel(Protocol):
    """A target, made ready by a backend. What `forward` returns may be overwritten by the next."""

    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        """Run the batch's rows and keep their keys and values. Returns hidden states (T, E) and
        the residual stream that enters the layers `taps`, side by side (T, F·E), see
        `Target.forward`."""

    def logits(self, hidden: Tensor, *, largest: bool = False) -> Tensor:
        """(R, E) → (R, V). `largest`: only the largest of each row is read, and where it is; all
        others may be anything smaller."""


class DrafterModel(Protocol):
    """A drafter, made ready by a backend. What `forward` returns may be overwritten by the next."""

    @property
    def drafter(self) -> Drafter:
        """The drafter, whose `project` and `logits` are the backend's."""

    def forward(self, batch: Batch, features: Tensor, cache: KVCache) -> DrafterOutput:
        """Run the batch's rows on projected features (T, D); keep their keys and values."""


class Backend(Protocol):
    """Makes models ready, once, at load. It never changes a model's weights, unless the target
    belongs to it alone (`own`).

    A backend made with `exact=True` makes targets in which no row depends on the other rows of a
    batch, to the last bit; `TiledTarget` helps if kernels choose loops by the number of rows.
    """

    name: str

    def target(self, target: BaseTarget, *, own: bool = False) -> TargetModel:
        """A target that runs here. `own`: no other object uses it, so its weights may be
        replaced by a new layout, and are not in memory twice."""

    def drafter(self, drafter: Drafter) -> DrafterModel:
        """A drafter that runs here."""
