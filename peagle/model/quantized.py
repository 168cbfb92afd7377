"""Targets whose decoder layers hold int8 or int4 weights, by torch's weight-only products on a CPU.

Shapes: R rows, I inputs, O outputs, G groups of GROUP inputs.

Activations stay as they are. The products take time in proportion to their rows: for the rows of a
prompt the plain weights are made, for that one product. The output head stays as it is: for the
K + 1 rows of a verification packed bf16 weights (model/packed.py) are as fast there.
"""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.config import InputError, InputWarning
from peagle.model.packed import StandIn, replace
from peagle.model.target import Target

KINDS = ("int8", "int4")
GROUP = 32  # inputs that share a scale and a zero in int4


class QuantizedLinear(StandIn):
    """A linear layer over weights of a few bits, in the dtype of its activations."""

    many: int  # rows from which a product with the plain weights, made for it, is faster

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """Whether there is a product for a layer of this shape."""
        return True

    def product(self, x: Tensor) -> Tensor:  # (R, I) → (R, O)
        """Product with the weights as they are held."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:  # (…, I) → (…, O)
        rows = x.reshape(-1, self.in_features)
        few = len(rows) < self.many
        out = self.product(rows) if few else F.linear(rows, self.weight)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


class Int8Linear(QuantizedLinear):
    """weight[o, i] = q[o, i] · scale[o], q from −127 to 127."""

    many = 24

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        # Rounded to the weights' dtype before it divides them, so that nothing is lost twice.
        scale = (weight.float().abs().amax(1) / 127).to(weight.dtype)
        self._scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a row may be zeros
        q = weight.float() / self._scale.float()[:, None]
        self._q = q.round().clamp(-127, 127).to(torch.int8)

    @property
    def weight(self) -> Tensor:
        return self._q.to(self._scale.dtype) * self._scale[:, None]

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self._q, self._scale)


class Int4Linear(QuantizedLinear):
    """weight[o, i] = (q[o, i] − 8) · scale[g, o] + zero[g, o], q from 0 to 15, g = i // GROUP."""

    many = 56

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        groups = weight.float().unflatten(1, (-1, GROUP))  # (O, G, GROUP)
        low, high = groups.aminmax(dim=-1)
        scale = ((high - low) / 15).to(weight.dtype)
        scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a group may be all the same
        zero = (low + 8 * scale.float()).to(weight.dtype)
        q = (groups - zero.float()[..., None]) / scale.float()[..., None] + 8
        q = q.round().clamp(0, 15).to(torch.int32).flatten(1)
        self._packed = torch._convert_weight_to_int4pack_for_cpu(q, 1)
        self._scales = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous()  # (G, O, 2)
        # torch does not tell in which blocks this CPU's layout is.
        blocks = (b for b in (64, 32) if torch.equal(_unpacked(self._packed[:64], b).T, q[:64]))
        self._block = next(blocks, None)
        if self._block is None:
            self.many = sys.maxsize

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        return linear.in_features % GROUP == 0 and linear.out_features % 64 == 0

    @property
    def weight(self) -> Tensor:
        if self._block is None:  # a layout that is not known here: by the product itself
            return self.product(torch.eye(self.in_features, dtype=self._scales.dtype)).T
        q = _unpacked(self._packed, self._block).unflatten(0, (-1, GROUP))  # (G, GROUP, O)
        # With every second element of `_scales` the products take five times as long.
        scale, zero = (part.contiguous() for part in self._scales[:, None].unbind(-1))
        return torch.addcmul(zero, q.to(scale.dtype).sub_(8), scale).flatten(0, 1).T

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scales)


def _unpacked(packed: Tensor, block: int) -> Tensor:
    """int4 weights (I, O) out of torch's layout (O, I / 2): blocks of outputs, in a byte one of the
    first and one of the second half of a block."""
    outputs, half = packed.shape
    parts = packed.view(outputs // block, 2 * half, block // 2).transpose(0, 1)
    return torch.cat([parts & 15, parts >> 4], dim=-1).flatten(1)


def check_quantize(kind: str | None, device: str) -> None:
    """Raises InputError for an unknown kind, or another device than the CPU."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"quantize {kind!r}: choose {' or '.join(KINDS)}, or leave it out")
    if kind is not None and device != "cpu":
        raise InputError(f"quantize {kind!r}: only on the CPU, not on {device}; leave it out")


def quantize_layers(target: Target, kind: str) -> None:
    """Replace the weights of the target's decoder layers by quantised ones, for good.

    Warns (InputWarning) of the matrices that stay: shapes without a product, and experts kept in
    one tensor. Raises InputError when none can be replaced.
    """
    made = Int8Linear if kind == "int8" else Int4Linear
    replace(target.layers, nn.Linear, lambda layer: made(layer) if made.takes(layer) else layer)
    kept = {
        ".".join(part for part in name.split(".") if not part.isdigit()): list(parameter.shape)
        for name, parameter in target.layers.named_parameters()
        if parameter.ndim > 1
    }
    if not kept:
        return
    said = ", ".join(f"{name} {shape}" for name, shape in sorted(kept.items()))
    if not any(isinstance(module, StandIn) for module in target.layers.modules()):
        raise InputError(
            f"quantize {kind!r}: no matrix of {target.name} has a shape that it takes ({said})"
        )
    warnings.warn(f"quantize {kind!r}: stay in {target.dtype}: {said}", InputWarning, stacklevel=2)
