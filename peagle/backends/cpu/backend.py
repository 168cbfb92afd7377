"""Models on a CPU in float32 or bfloat16, by the C++ of native/."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from peagle.backends.cpu.attention import CpuAttend
from peagle.backends.cpu.drafter import GenericDrafter, NativeDrafter
from peagle.backends.cpu.library import DTYPES, load
from peagle.backends.cpu.matrix import Place, Weights, replace_head, replace_linears
from peagle.backends.cpu.ranking import CpuRanking
from peagle.backends.cpu.target import NativeTarget
from peagle.backends.own_code import OwnCodeTarget
from peagle.backends.ranking import RANKINGS
from peagle.backends.tiles import TiledTarget
from peagle.model.base_target import BaseTarget
from peagle.model.described import DescribedTarget

if TYPE_CHECKING:
    from peagle.backends.base import TargetModel
    from peagle.model.drafter import Drafter
    from peagle.model.target import Target

Describe = Callable[["Target"], DescribedTarget | None]
Products = dict[str, Weights]  # of a described target, by their names
Keep = Callable[[DescribedTarget, Callable[[Place], Products]], Products]
log = logging.getLogger(__name__)


class CpuBackend:
    """See `Backend`. Raises NoCompiler, when it is made, without native code.

    `exact`: a row's result depends on nothing beside it. Native products and attention keep to that
    always; only the code of other models is run in another way.
    """

    name = "cpu"

    def __init__(self, describe: Describe, keep: Keep, *, exact: bool = False) -> None:
        """`describe`: the description of a loaded target, by which native code runs it. `keep`: the
        products of a described target, made in memory of its choice or known from before."""
        load()
        RANKINGS.update({("cpu", dtype): CpuRanking() for dtype in DTYPES})
        self.exact = exact
        self.describe = describe
        self.keep = keep

    def target(self, target: BaseTarget, *, own: bool = False) -> "TargetModel":
        """A target that runs here. Its products are native ones over a copy of its weights; `own`:
        they take the place of its own."""
        if isinstance(target, DescribedTarget):
            return NativeTarget(target, self.keep)
        loaded = cast("Target", target)
        if (described := self.describe(loaded)) is not None:
            return NativeTarget(described, self.keep)
        if own:
            _replace_products(loaded)
        why = "its own code runs the layers, with native products and attention"
        log.info("%s (%s): %s", target.name, target.config.model_type, why)
        copy = loaded.exact() if self.exact else loaded.copy()
        _replace_products(copy)
        model = OwnCodeTarget(copy, CpuAttend)
        return TiledTarget(model) if self.exact else model

    def drafter(self, drafter: "Drafter") -> GenericDrafter:
        """A drafter that runs here."""
        if drafter.config.transformer.hidden_act == "silu":
            return NativeDrafter(drafter)
        return GenericDrafter(drafter)


def _replace_products(target: "Target") -> None:
    """Make all products of a target native ones."""
    replace_linears(target.model)
    replace_head(target, target.model.get_output_embeddings())
