"""Weights as the C++ reads them (native/matrix.h), and linear layers over them.

Shapes: R rows, I inputs, O outputs, G groups of GROUP inputs.
"""

import ctypes
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.backends.cpu.library import load
from peagle.backends.cpu.structs import Matrix
from peagle.model.int8 import round_int8

if TYPE_CHECKING:
    from peagle.model.target import Target

GROUP = 32  # inputs that share a scale and a zero
PANEL = 16  # outputs that lie side by side
CHUNK = 2048  # outputs that are rounded at a time: their float32 stays in the cache
BITS = {torch.float32: 32, torch.bfloat16: 16}
Place = Callable[[Tensor], Tensor]  # the same tensor, contiguous, in some memory


class Weights(NamedTuple):
    """The weights (O, I) of a product, laid out for this CPU."""

    data: Tensor
    scales: Tensor | None  # of 8 and 4 bits; tiled 4 bits have theirs among `data`
    bits: int
    tiled: bool
    dtype: torch.dtype  # of inputs and outputs
    outputs: int
    inputs: int

    @classmethod
    def plain(cls, weight: Tensor, place: Place = Tensor.contiguous) -> "Weights":
        """Copy float32 or bf16 weights into panels; weights in tiles are read in place."""
        weight, bits = weight.detach(), BITS[weight.dtype]
        tiled = bits == 16 and fits_tiles(weight)
        data = weight.contiguous() if tiled else place(_in_panels(weight, 32 // bits))
        return cls(data, None, bits, tiled, weight.dtype, *weight.shape)

    @classmethod
    def int8(cls, q: Tensor, scale: Tensor, place: Place = Tensor.contiguous) -> "Weights":
        """weight[o, i] = q[o, i] · scale[o], q (O, I) int8 from −127 to 127, scale (O,)."""
        tiled = scale.dtype == torch.bfloat16 and fits_tiles(q)
        if tiled:
            tiles = q.view(len(q) // PANEL, PANEL, -1, 16, 2)
            data = tiles.permute(0, 2, 3, 4, 1)
        else:
            data = _in_panels(q, GROUP)
        return cls(place(data), place(scale), 8, tiled, scale.dtype, *q.shape)

    @classmethod
    def int4(
        cls, q: Tensor, scale: Tensor, zero: Tensor, place: Place = Tensor.contiguous
    ) -> "Weights":
        """weight[o, i] = (q[o, i] − 8) · scale[o, g] + zero[o, g], q (O, I) from 0 to 15, scale and
        zero (O, G), g = i // GROUP."""
        if scale.dtype == torch.bfloat16 and fits_tiles(q):
            tiles = place(_tiles_of_int4(q, scale, zero))
            return cls(tiles, None, 4, True, scale.dtype, *q.shape)
        low, high = q.to(torch.int8).view(len(q), -1, 2, GROUP // 2).unbind(2)
        data = _in_panels((low | high << 4).flatten(1), GROUP // 2)
        pairs = torch.stack([_whole_panels(scale), _whole_panels(zero)], dim=-1)  # (O, G, 2)
        scales = pairs.unflatten(0, (-1, PANEL)).permute(0, 2, 3, 1)
        return cls(place(data), place(scales), 4, False, scale.dtype, *q.shape)

    def matrix(self, bias: Tensor | None) -> Matrix:
        """The structure that the library reads, valid while these weights and the bias live."""
        scales = None if self.scales is None else self.scales.data_ptr()
        added = None if bias is None else bias.data_ptr()
        sizes = (self.bits, int(self.tiled), self.outputs, self.inputs)
        return Matrix(self.data.data_ptr(), scales, added, *sizes)


def _whole_panels(rows: Tensor) -> Tensor:
    """(O, …) → (panels · PANEL, …), with zeros after the last output."""
    missing = -len(rows) % PANEL
    return rows if not missing else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _in_panels(weight: Tensor, step: int) -> Tensor:
    """(O, I) → (panels, words, PANEL) int32, not contiguous; a word is four bytes of neighbouring
    inputs. Zeros fill up the last panel, and inputs to whole steps."""
    missing = -weight.shape[1] % step
    padded = F.pad(weight, (0, missing)) if missing else weight.contiguous()
    # Torch transposes float32 three times as fast as int32; no number is computed with.
    words = _whole_panels(padded.view(torch.float32))
    return words.unflatten(0, (-1, PANEL)).transpose(1, 2).view(torch.int32)


def fits_tiles(weight: Tensor) -> bool:
    """Whether this CPU has AMX, and weights (O, I) fill its tiles."""
    outputs, inputs = weight.shape
    return load().tiles and outputs % PANEL == 0 and inputs % GROUP == 0


def _tiles_of_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """(panels, steps, bytes): panels of 16 outputs, steps of 32 inputs. Of each output scale and
    zero, then four vectors of four rows of pairs of inputs; each of their 16 bits has one number of
    each row."""
    panels = len(q) // PANEL
    steps = q.shape[1] // GROUP
    tiles = q.to(torch.int16).view(panels, PANEL, steps, 4, 4, 2).permute(4, 0, 2, 3, 1, 5)
    fours = sum(row << 4 * at for at, row in enumerate(tiles))  # (panels, steps, 4, 16, 2)
    pairs = torch.stack([scale, zero], dim=-1).view(panels, PANEL, steps, 2).transpose(1, 2)
    parts = [part.reshape(panels, steps, -1).view(torch.uint8) for part in (pairs, fours)]
    return torch.cat(parts, dim=-1)


class CpuLinear(nn.Module):
    """A linear layer by native products. For inference: no gradient reaches its weights.

    Each row is computed as if it were alone. Copies share the weights, which never change.
    """

    def __init__(self, weights: Weights, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features = weights.inputs
        self.out_features = weights.outputs
        self.weights = weights
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.matrix = weights.matrix(self.bias)

    def __deepcopy__(self, _memo: object) -> "CpuLinear":
        return copy(self)

    @classmethod
    def of(cls, linear: nn.Linear, kind: str | None = None) -> nn.Module:
        """A linear layer of the same weights, or of these rounded to int8 or int4. The given one
        where its inputs are no whole groups of int4."""
        if kind == "int4" and linear.in_features % GROUP:
            return linear
        return cls(quantize_weights(linear.weight.detach(), kind), linear.bias)

    @property
    def weight(self) -> Tensor:
        """(O, I) the plain weights; made anew at every call, but for those of tiles."""
        form = self.weights
        if form.bits <= 8:
            ones = torch.eye(form.inputs, dtype=form.dtype)
            return torch.cat([multiply(part, form.matrix(None)) for part in ones.split(512)]).T
        return form.data if form.tiled else self._rows(torch.arange(form.outputs))

    def some(self, x: Tensor, ids: Tensor) -> Tensor:
        """x (…, I) → (…, N), the outputs `ids` (N,): as among all of them, for 16 bits or more."""
        whole_panels = F.pad(ids, (0, -len(ids) % PANEL))
        weights = Weights.plain(self._rows(whole_panels))
        return multiply(x, weights.matrix(None))[..., : len(ids)]

    def _rows(self, ids: Tensor) -> Tensor:
        """(N, I) weights of 16 bits or more."""
        form = self.weights
        if form.tiled:
            return form.data[ids]
        words = form.data[ids // PANEL, :, ids % PANEL]
        return words.contiguous().view(form.dtype)[:, : form.inputs]

    def forward(self, x: Tensor) -> Tensor:  # (…, I) → (…, O)
        return multiply(x, self.matrix)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def quantize_weights(weight: Tensor, kind: str | None, place: Place = Tensor.contiguous) -> Weights:
    """Weights (O, I) laid out in int8 or int4; as they are where `kind` is None."""
    if kind is None:
        return Weights.plain(weight, place)
    if kind == "int8":
        parts = [round_int8(part, weight.dtype) for part in weight.split(CHUNK)]
        q, scale = map(torch.cat, zip(*parts, strict=True))
        return Weights.int8(q, scale, place)
    return Weights.int4(*round_int4(weight), place)


def round_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (O, I) int32, scale and zero (O, G) of weights (O, I)."""
    groups = weight.float().unflatten(1, (-1, GROUP))  # (O, G, GROUP)
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).to(weight.dtype)
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # a group may be all the same
    zero = (low + 8 * scale.float()).to(weight.dtype)
    q = (groups - zero.float()[..., None]) / scale.float()[..., None] + 8
    return q.round().clamp(0, 15).to(torch.int32).flatten(1), scale, zero


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """x (…, I) times a matrix → (…, O)."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], matrix.outputs)
    rows = x.numel() // matrix.inputs
    pointers = (x.data_ptr(), ctypes.byref(matrix), out.data_ptr())
    load().function("linear", x.dtype)(*pointers, rows, torch.get_num_threads())
    return out


def replace_linears(root: nn.Module, make: Callable[[nn.Linear], nn.Module] = CpuLinear.of) -> None:
    """Replace the linear layers below `root` by the results of `make`, one after another: the
    weights of one layer at a time exist twice."""
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            # The code of a subclass is not known.
            if type(child) is nn.Linear and child.weight.dtype in BITS:
                setattr(parent, name, make(child))


def replace_head(target: "Target", head: nn.Module) -> None:
    """Make another module a target's output head: that of the model, and of its view `head`."""
    target.model.set_output_embeddings(head)
    cast(Any, target.head).set_output_embeddings(head)
