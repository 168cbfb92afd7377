"""Models on a CPU in float32 or bfloat16, by the C++ of native/."""

import sys

import torch

from peagle.backends.cpu.drafter import GenericDrafter, NativeDrafter
from peagle.backends.cpu.library import load
from peagle.backends.cpu.matrix import MANY_ROWS
from peagle.backends.cpu.target import GenericTarget, NativeTarget, is_native
from peagle.model.drafter import Drafter
from peagle.model.target import Target


class CpuBackend:
    """See `Backend`. Raises NoCompiler, when it is made, without native code.

    `exact`: a row's result depends on nothing beside it; elsewhere the products of many rows may be
    torch's.
    """

    name = "cpu"

    def __init__(self, *, exact: bool = False) -> None:
        load()
        self.exact = exact

    def target(self, target: Target) -> NativeTarget | GenericTarget:
        """A target that runs here."""
        rows = sys.maxsize if self.exact else native_rows(target.dtype)
        if is_native(target):
            return NativeTarget(target, rows)
        return GenericTarget(target, rows, exact=self.exact)

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
