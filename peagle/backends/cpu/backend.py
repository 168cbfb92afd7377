"""Models on a CPU in float32 or bfloat16, by the C++ of native/."""

import logging
import sys

import torch

from peagle.backends.base import TargetModel
from peagle.backends.cpu.drafter import GenericDrafter, NativeDrafter
from peagle.backends.cpu.library import load
from peagle.backends.cpu.matrix import MANY_ROWS
from peagle.backends.cpu.target import GenericTarget, NativeTarget, is_native
from peagle.backends.tiles import TiledTarget
from peagle.model.drafter import Drafter
from peagle.model.target import Target

log = logging.getLogger(__name__)


class CpuBackend:
    """See `Backend`. Raises NoCompiler, when it is made, without native code.

    `exact`: a row's result depends on nothing beside it; elsewhere the products of many rows may be
    torch's.
    """

    name = "cpu"

    def __init__(self, *, exact: bool = False) -> None:
        load()
        self.exact = exact

    def target(self, target: Target) -> TargetModel:
        """A target that runs here. Native products and attention compute each row alone; the code
        of other models is run in tiles where it has to be exact."""
        rows = sys.maxsize if self.exact else native_rows(target.dtype)
        if is_native(target):
            return NativeTarget(target, rows)
        kind = target.config.model_type
        why = "its own code runs the layers, with native products and attention"
        log.info("%s (%s): %s", target.name, kind, why)
        if self.exact:
            return TiledTarget(GenericTarget(target.exact(), rows))
        return GenericTarget(target.copy(), rows)

    def drafter(self, drafter: Drafter) -> GenericDrafter:
        """A drafter that runs here."""
        if drafter.config.transformer.hidden_act == "silu":
            return NativeDrafter(drafter)
        return GenericDrafter(drafter)


def native_rows(dtype: torch.dtype) -> int:
    """Rows up to which native products are used: above, torch's are where they are good."""
    if dtype == torch.float32:
        return MANY_ROWS
    if load().tiles or not torch.backends.mkldnn.is_available():
        return sys.maxsize
    return MANY_ROWS if torch.ops.mkldnn._is_mkldnn_bf16_supported() else sys.maxsize
