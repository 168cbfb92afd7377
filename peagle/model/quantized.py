"""Targets whose decoder layers hold int8 or int4 weights, on a CPU.

Shapes: R rows, I inputs, O outputs, G groups of GROUP inputs.

Where there are tiles (model/native.py) the weights become whole numbers in bf16 on their way into
them, for any number of rows, and the output head is int8. Elsewhere it stays as it is: torch's
weight-only products take time in proportion to the rows, and for the rows of a prompt the plain
weights are made, for that one product. Activations stay as they are.
"""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.config import InputError, InputWarning
from peagle.model import native
from peagle.model.packed import StandIn, replace
from peagle.model.target import Target

KINDS = ("int8", "int4")
GROUP = 32  # inputs that share a scale and a zero in int4


class TiledInts(StandIn):
    """int8 or int4 weights, as the two classes below have them, for our own product: by panels of
    16 outputs, and in these by tiles of 32 inputs, a tile as 16 rows of pairs of inputs.

    int8: a row has the first input of each output, then the second. int4: of each output scale and
    zero, then four vectors of four rows each; each of their 16 bits has one number of each row."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        panels, steps = len(weight) // 16, weight.shape[1] // GROUP
        if kind == "int8":
            q, scale = _int8(weight)
            tiles = q.view(panels, 16, steps, 16, 2).permute(0, 2, 3, 4, 1).contiguous()
            self.matrix = self._matrix(tiles, scale, 8)
            return
        q, *scales = _int4(weight)
        tiles = q.to(torch.int16).view(panels, 16, steps, 4, 4, 2).permute(4, 0, 2, 3, 1, 5)
        fours = sum(row << 4 * at for at, row in enumerate(tiles))  # (panels, steps, 4, 16, 2)
        pairs = torch.stack(scales, dim=-1).view(panels, 16, steps, 2).transpose(1, 2)
        parts = [part.reshape(panels, steps, -1).view(torch.uint8) for part in (pairs, fours)]
        self.matrix = self._matrix(torch.cat(parts, dim=-1), None, 4)

    def _matrix(self, data: Tensor, scales: Tensor | None, bits: int) -> native.Matrix:
        return native.Matrix(data, scales, bits, self.out_features, self.in_features)

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """Whether there is a product for such a layer here."""
        fits = linear.in_features % GROUP == 0 and linear.out_features % 16 == 0
        return native.tiles() and linear.weight.dtype == torch.bfloat16 and fits

    @property
    def weight(self) -> Tensor:
        one = torch.eye(self.in_features, dtype=torch.bfloat16)
        return native.linear(one, self.matrix, None).T

    def forward(self, x: Tensor) -> Tensor:  # (…, I) → (…, O)
        return native.linear(x.contiguous(), self.matrix, self.bias)


class QuantizedLinear(StandIn):
    """A linear layer over weights of a few bits, by torch, in the dtype of its activations."""

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
        self._q, self._scale = _int8(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        return self._q.to(self._scale.dtype) * self._scale[:, None]

    def product(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self._q, self._scale)


class Int4Linear(QuantizedLinear):
    """weight[o, i] = (q[o, i] − 8) · scale[o, g] + zero[o, g], q from 0 to 15, g = i // GROUP."""

    many = 56

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        q, *scales = _int4(linear.weight.detach())
        self._packed = torch._convert_weight_to_int4pack_for_cpu(q, 1)
        self._scales = torch.stack(scales, dim=-1).transpose(0, 1).contiguous()  # (G, O, 2)
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


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """q (O, I) and scale (O,) of weights (O, I). The scale is rounded to the weights' dtype before
    it divides them, so that nothing is lost twice."""
    scale = (weight.float().abs().amax(1) / 127).to(weight.dtype)
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a row may be zeros
    q = weight.float() / scale.float()[:, None]
    return q.round().clamp(-127, 127).to(torch.int8), scale


def _int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (O, I) int32, scale and zero (O, G) of weights (O, I)."""
    groups = weight.float().unflatten(1, (-1, GROUP))  # (O, G, GROUP)
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).to(weight.dtype)
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a group may be all the same
    zero = (low + 8 * scale.float()).to(weight.dtype)
    q = (groups - zero.float()[..., None]) / scale.float()[..., None] + 8
    return q.round().clamp(0, 15).to(torch.int32).flatten(1), scale, zero


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
        raise InputError(
            f"quantize {kind!r}: only on the CPU, not on {device}; choose the device cpu"
        )


def quantize_layers(target: Target, kind: str) -> None:
    """Replace the weights of the target's decoder layers by quantised ones, for good.

    Warns (InputWarning) of the matrices that stay: shapes without a product, and experts kept in
    one tensor. Raises InputError when none can be replaced.
    """
    by_torch = Int8Linear if kind == "int8" else Int4Linear

    def made(layer: nn.Linear) -> nn.Module:
        if TiledInts.takes(layer):
            return TiledInts(layer, kind)
        return by_torch(layer) if by_torch.takes(layer) else layer

    replace(target.layers, nn.Linear, made)
    head = target.model.get_output_embeddings()
    if type(head) is nn.Linear and TiledInts.takes(head):
        target.model.set_output_embeddings(TiledInts(head, "int8"))
        target.renew_head()
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
