"""Targets whose decoder layers hold int8 or int4 weights, on a CPU.

On a CPU with AMX activations stay as they are. Elsewhere each group of GROUP activations is rounded
to 8 bits, as llama.cpp does it: so bytes are multiplied by bytes.
"""

import warnings
from typing import TYPE_CHECKING

from torch import nn

from peagle.backends.cpu.matrix import BITS, CpuLinear, replace_head, replace_linears
from peagle.errors import InputError, InputWarning

if TYPE_CHECKING:
    from peagle.model.target import Target

KINDS = ("int8", "int4")


def check_quantize(kind: str, device: str) -> None:
    """Raises InputError for an unknown kind, or another device than the CPU."""
    if kind not in KINDS:
        known = f"choose {' or '.join(KINDS)}"
        raise InputError("not a kind of quantisation", field="quantize", value=kind, fix=known)
    if device != "cpu":
        why = f"only on the CPU, not on {device}"
        raise InputError(why, field="quantize", value=kind, fix="choose `device` cpu")


def quantize(target: "Target", kind: str) -> None:
    """Replace the weights of the target's decoder layers by quantised ones, and those of its output
    head by int8. Only the owner of a target may do it, before anything runs it.

    Warns (InputWarning) of the matrices that stay: shapes without a product, and experts kept in
    one tensor. Raises InputError when none can be replaced, NoCompiler without native code.
    """
    if target.dtype not in BITS:
        why = f"there are no products of {target.dtype}"
        raise InputError(why, field="quantize", value=kind, fix="choose `dtype` bfloat16")
    target.quantize = kind
    replace_linears(target.layers, lambda linear: CpuLinear.of(linear, kind))
    _check_replaced(target, kind)
    head = target.model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype in BITS:
        replace_head(target, CpuLinear.of(head, "int8"))


def _check_replaced(target: "Target", kind: str) -> None:
    """Warn of matrices that keep their dtype. Raises InputError when none was replaced."""
    kept = {
        ".".join(part for part in name.split(".") if not part.isdigit()): list(parameter.shape)
        for name, parameter in target.layers.named_parameters()
        if parameter.ndim > 1
    }
    if not kept:
        return
    listed = ", ".join(f"{name} {shape}" for name, shape in sorted(kept.items()))
    if not any(isinstance(module, CpuLinear) for module in target.layers.modules()):
        why = f"no matrix of {target.name} has a shape that it takes ({listed})"
        raise InputError(why, field="quantize", value=kind, fix="leave it out")
    kept_in = f"quantize {kind!r}: stay in {target.dtype}: {listed}"
    warnings.warn(kept_in, InputWarning, stacklevel=3)
