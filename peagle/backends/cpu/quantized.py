"""Targets whose decoder layers hold int8 or int4 weights, on a CPU.

On a CPU with AMX activations stay as they are. Elsewhere each group of GROUP activations is rounded
to 8 bits, as llama.cpp does it: so bytes are multiplied by bytes.

Shapes: I inputs, O outputs, G groups of GROUP inputs.
"""

import warnings

import torch
from torch import Tensor, nn

from peagle.backends.cpu.matrix import BITS, GROUP, CpuLinear, Weights
from peagle.errors import InputError, InputWarning
from peagle.model.target import Target

KINDS = ("int8", "int4")


def check_quantize(kind: str | None, device: str) -> None:
    """Raises InputError for an unknown kind, or another device than the CPU."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"quantize {kind!r}: choose {' or '.join(KINDS)}, or leave it out")
    if kind is not None and device != "cpu":
        raise InputError(
            f"quantize {kind!r}: only on the CPU, not on {device}; choose the device cpu"
        )


def quantize(target: Target, kind: str) -> Target:
    """Replace the weights of the target's decoder layers by quantised ones, and those of its output
    head by int8, for good. The given target must not be used any more.

    Warns (InputWarning) of the matrices that stay: shapes without a product, and experts kept in
    one tensor. Raises InputError when none can be replaced, NoCompiler without native code.
    """
    quantize_linears(target.layers, kind)
    _check_replaced(target, kind)
    head = target.model.get_output_embeddings()
    if type(head) is nn.Linear and _takes(head, "int8"):
        target.model.set_output_embeddings(quantized(head, "int8"))
    return Target(target.model, target.tokenizer, target.name)


def quantize_linears(module: nn.Module, kind: str) -> None:
    """Quantise the linear layers in `module`, one after another: the weights of one layer at a time
    exist twice."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            # What a subclass does is not known.
            if type(child) is nn.Linear and _takes(child, kind):
                setattr(parent, name, quantized(child, kind))


def quantized(linear: nn.Linear, kind: str) -> CpuLinear:
    """A linear layer over int8 or int4 weights."""
    weight = linear.weight.detach()
    if kind == "int8":
        weights = Weights.int8(*round_int8(weight))
    else:
        weights = Weights.int4(*round_int4(weight))
    return CpuLinear(weights, linear.bias)


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """q (O, I) and scale (O,) of weights (O, I). The scale is rounded to the weights' dtype before
    it divides them, so that nothing is lost twice."""
    scale = (weight.float().abs().amax(1) / 127).to(weight.dtype)
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a row may be zeros
    q = weight.float() / scale.float()[:, None]
    return q.round().clamp(-127, 127).to(torch.int8), scale


def round_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (O, I) int32, scale and zero (O, G) of weights (O, I)."""
    groups = weight.float().unflatten(1, (-1, GROUP))  # (O, G, GROUP)
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).to(weight.dtype)
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a group may be all the same
    zero = (low + 8 * scale.float()).to(weight.dtype)
    q = (groups - zero.float()[..., None]) / scale.float()[..., None] + 8
    return q.round().clamp(0, 15).to(torch.int32).flatten(1), scale, zero


def _takes(linear: nn.Linear, kind: str) -> bool:
    """Whether there is a product for such a layer."""
    whole_groups = kind == "int8" or linear.in_features % GROUP == 0
    return whole_groups and linear.weight.dtype in BITS


def _check_replaced(target: Target, kind: str) -> None:
    """Tell what stays, or that all does."""
    kept = {
        ".".join(part for part in name.split(".") if not part.isdigit()): list(parameter.shape)
        for name, parameter in target.layers.named_parameters()
        if parameter.ndim > 1
    }
    if not kept:
        return
    listed = ", ".join(f"{name} {shape}" for name, shape in sorted(kept.items()))
    if not any(isinstance(module, CpuLinear) for module in target.layers.modules()):
        raise InputError(
            f"quantize {kind!r}: no matrix of {target.name} has a shape that it takes ({listed})"
        )
    warnings.warn(
        f"quantize {kind!r}: stay in {target.dtype}: {listed}", InputWarning, stacklevel=3
    )
