"""Weights as the C++ reads them (native/matrix.h), and linear layers over them.

Shapes: R rows, I inputs, O outputs, G groups of GROUP inputs.
"""

import ctypes
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.backends.cpu.library import COUNT, POINTER, load

GROUP = 32  # inputs that share a scale and a zero in 4 bits
PANEL = 16  # outputs of a tile
MANY_ROWS = 64  # from more rows on, torch's products are faster where they are good
BITS = {torch.float32: 32, torch.bfloat16: 16}


class Matrix(ctypes.Structure):
    """Mirrors native/matrix.h. Pointers only: `Weights` keeps what they point to."""

    _fields_ = [("data", POINTER), ("scales", POINTER), ("bias", POINTER)]
    _fields_ += [("bits", COUNT), ("tiled", COUNT), ("outputs", COUNT), ("inputs", COUNT)]


class Weights(NamedTuple):
    """The weights (O, I) of a product, laid out for this CPU."""

    data: Tensor
    scales: Tensor | None  # of 8 and 4 bits; tiled 4 bits have theirs among `data`
    bits: int
    tiled: bool
    dtype: torch.dtype  # of what is multiplied, and of the product
    outputs: int
    inputs: int

    @classmethod
    def plain(cls, weight: Tensor) -> "Weights":
        """Float32 or bf16 weights as they lie; nothing is copied."""
        tiled = weight.dtype == torch.bfloat16 and fits_tiles(weight)
        data = weight.detach().contiguous()
        return cls(data, None, BITS[weight.dtype], tiled, weight.dtype, *weight.shape)

    @classmethod
    def int8(cls, q: Tensor, scale: Tensor) -> "Weights":
        """weight[o, i] = q[o, i] · scale[o], q (O, I) int8, scale (O,)."""
        tiled = scale.dtype == torch.bfloat16 and fits_tiles(q)
        data = q.contiguous()
        if tiled:
            tiles = q.view(len(q) // PANEL, PANEL, -1, 16, 2)
            data = tiles.permute(0, 2, 3, 4, 1).contiguous()
        return cls(data, scale, 8, tiled, scale.dtype, *q.shape)

    @classmethod
    def int4(cls, q: Tensor, scale: Tensor, zero: Tensor) -> "Weights":
        """weight[o, i] = (q[o, i] − 8) · scale[o, g] + zero[o, g], q (O, I) from 0 to 15, scale and
        zero (O, G), g = i // GROUP."""
        if scale.dtype == torch.bfloat16 and fits_tiles(q):
            return cls(_tiles_of_int4(q, scale, zero), None, 4, True, scale.dtype, *q.shape)
        words = q.to(torch.int32).view(len(q), -1, 8, 4).unbind(2)  # each (O, G, 4)
        data = torch.stack([word << 4 * at for at, word in enumerate(words)]).sum(0).to(torch.int32)
        scales = torch.stack([scale, zero], dim=-1)
        return cls(data, scales, 4, False, scale.dtype, *q.shape)

    def matrix(self, bias: Tensor | None) -> Matrix:
        """As the library reads it, for as long as these weights and the bias are alive."""
        scales = None if self.scales is None else self.scales.data_ptr()
        added = None if bias is None else bias.data_ptr()
        sizes = (self.bits, int(self.tiled), self.outputs, self.inputs)
        return Matrix(self.data.data_ptr(), scales, added, *sizes)


def fits_tiles(weight: Tensor) -> bool:
    """Whether this CPU has AMX, and weights (O, I) fill its tiles."""
    outputs, inputs = weight.shape
    return load().tiles and outputs % PANEL == 0 and inputs % GROUP == 0


def _tiles_of_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """(panels, steps, bytes): panels of 16 outputs, steps of 32 inputs. Of each output scale and
    zero, then four vectors of four rows of pairs of inputs; each of their 16 bits has one number of
    each row."""
    panels, steps = len(q) // PANEL, q.shape[1] // GROUP
    tiles = q.to(torch.int16).view(panels, PANEL, steps, 4, 4, 2).permute(4, 0, 2, 3, 1, 5)
    fours = sum(row << 4 * at for at, row in enumerate(tiles))  # (panels, steps, 4, 16, 2)
    pairs = torch.stack([scale, zero], dim=-1).view(panels, PANEL, steps, 2).transpose(1, 2)
    parts = [part.reshape(panels, steps, -1).view(torch.uint8) for part in (pairs, fours)]
    return torch.cat(parts, dim=-1)


class CpuLinear(nn.Module):
    """A linear layer by native products. For inference: no gradient reaches its weights.

    Each row is computed as if it were alone. More than `native_rows` rows are for torch.
    """

    _data: Tensor
    _scales: Tensor | None

    def __init__(
        self, weights: Weights, bias: Tensor | None, native_rows: int = sys.maxsize
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = weights.inputs, weights.outputs
        self.native_rows = native_rows
        self._form = weights._replace(data=torch.empty(0), scales=None)
        # As buffers they are shared by copies of this layer.
        self.register_buffer("_data", weights.data, persistent=False)
        self.register_buffer("_scales", weights.scales, persistent=False)
        self.register_parameter("bias", None)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear, native_rows: int = sys.maxsize) -> "CpuLinear":
        """A linear layer over the same weights."""
        return cls(Weights.plain(linear.weight), linear.bias, native_rows)

    @property
    def weights(self) -> Weights:
        """As they are laid out."""
        return self._form._replace(data=self._data, scales=self._scales)

    @property
    def matrix(self) -> Matrix:
        """What the library multiplies by, for as long as this layer is alive."""
        return self.weights.matrix(self.bias)

    @property
    def weight(self) -> Tensor:
        """(O, I) the plain weights; of 8 and 4 bits made anew at every call."""
        if self.weights.bits > 8:
            return self.weights.data
        ones = torch.eye(self.in_features, dtype=self.weights.dtype)
        matrix = self.weights.matrix(None)
        return torch.cat([multiply(part, matrix) for part in ones.split(512)]).T

    def forward(self, x: Tensor) -> Tensor:  # (…, I) → (…, O)
        if x.numel() > self.native_rows * self.in_features:
            return F.linear(x, self.weight, self.bias)
        return multiply(x, self.matrix)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """x (…, I) times a matrix → (…, O)."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], matrix.outputs)
    rows = x.numel() // matrix.inputs
    function = load().function("linear", x.dtype)
    threads = torch.get_num_threads()
    function(x.data_ptr(), ctypes.byref(matrix), out.data_ptr(), rows, threads)
    return out


def replace_linears(module: nn.Module, native_rows: int) -> None:
    """Put native layers over the same weights in the place of the linear layers in `module`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            # What a subclass does is not known.
            if type(child) is nn.Linear and child.weight.dtype in BITS:
                setattr(parent, name, CpuLinear.of(child, native_rows))
