"""The cuda backend: Triton's paged attention and CUDA graphs around the models' own code.

Shapes: T rows, E target hidden, F feature layers, D drafter hidden, R rows, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor

from peagle.backends.base import TargetModel
from peagle.backends.batch import Batch
from peagle.backends.cuda.graphs import Runner
from peagle.backends.kv_cache import KVCache
from peagle.backends.tiles import TiledTarget
from peagle.model.base_target import BaseTarget, TargetOutput
from peagle.model.drafter import Drafter
from peagle.model.layers import DrafterOutput

if TYPE_CHECKING:
    from peagle.model.target import Target


class CudaTarget:
    """A target run by its own code, by CUDA graphs where possible."""

    def __init__(self, target: "Target", *, exact: bool) -> None:
        self.model = target
        self.runner = Runner(exact=exact)

    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        layers = tuple(taps)
        model = partial(self.model.forward, taps=layers)
        return TargetOutput(*self.runner.run(model, batch, cache, taps=layers))

    def logits(self, hidden: Tensor, *, largest: bool = False) -> Tensor:  # noqa: ARG002
        return self.model.logits(hidden)


class CudaDrafter:
    """A drafter run by its own code, by CUDA graphs where possible."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.runner = Runner(exact=False)  # no output depends on a draft's bits

    def forward(self, batch: Batch, features: Tensor, cache: KVCache) -> DrafterOutput:
        return DrafterOutput(*self.runner.run(self.drafter, batch, cache, rows=[features]))


class CudaBackend:
    """See `Backend`. Models must be of one of `choose.CUDA_DTYPES`."""

    name = "cuda"

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    def target(self, target: BaseTarget, *, own: bool = False) -> TargetModel:  # noqa: ARG002
        loaded = cast("Target", target)  # described ones run on the CPU
        if self.exact:
            return TiledTarget(CudaTarget(loaded.exact(), exact=True))
        return CudaTarget(loaded, exact=False)

    def drafter(self, drafter: Drafter) -> CudaDrafter:
        return CudaDrafter(drafter)
