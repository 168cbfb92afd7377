"""All layers of a decoder, or of a head, and the norm after them, in one native call.

Shapes: T rows, D hidden, F feature layers, H head size, G tables of RoPE.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from peagle.backends.cpu import structs
from peagle.backends.cpu.attention import native_batch
from peagle.backends.cpu.library import load
from peagle.backends.cpu.matrix import CpuLinear

if TYPE_CHECKING:
    from peagle.backends.batch import Batch
    from peagle.backends.kv_cache import KVCache
    from peagle.model.layer_config import Rotary


class Decoded(NamedTuple):
    """A decoder's outputs for T rows."""

    out: Tensor  # (T, D) leaves the last layer
    normed: Tensor  # (T, D)
    features: Tensor  # (T, F·D) enters the layers `taps`


def native_layer(
    products: dict[str, CpuLinear],  # by the names in structs.PRODUCTS, all of them
    norms: dict[str, Tensor],  # by those in structs.NORMS; a layer may have fewer
    *,
    normed_residual: bool = False,  # in a head: the residual is the output of the norm `hidden`
    window: int = 0,  # newest positions that a row sees; 0: all
    rope: int = 0,  # which of the tables of cos and sin
) -> structs.Layer:
    """A layer for the library."""
    layer = structs.Layer(normed_residual=normed_residual, window=window, rope=rope)
    weights = {name: weight.float() for name, weight in norms.items()}
    for path in structs.PRODUCTS:
        setattr(layer, path, products[path].matrix)
    for name, weight in weights.items():
        setattr(layer, f"{name}_norm", weight.data_ptr())
    layer.alive = products, weights
    return layer


class RotaryTable:
    """cos and sin of RoPE by position, kept: torch would start a team of threads for each call."""

    def __init__(self, rotary: "Rotary", dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._like = torch.empty(0, dtype=dtype)
        self._kept = self._like, self._like

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (T, H) at positions (T,)."""
        cos, sin = self._kept
        needed = int(positions.max()) + 1
        if needed > len(cos):
            count = 1 << needed.bit_length()
            cos, sin = self._rotary(self._like, torch.arange(count)[None])
            cos, sin = self._kept = cos[0], sin[0]
        return cos[positions], sin[positions]


class Decoder:
    """Layers of one shape, ready for the library."""

    def __init__(self, layers: Sequence[structs.Layer], norm: Tensor, model: structs.Model) -> None:
        """`norm`: weights (D,) of the norm after the layers. `model` lacks layers, norm and width:
        they are added."""
        self.width = len(norm)
        self._given = layers  # they keep the weights, and the array is a copy without these
        self._layers = (structs.Layer * len(layers))(*layers)
        self._norm = norm.float()
        self._model = model
        model.layers = ctypes.addressof(self._layers)
        model.count = len(layers)
        model.norm = self._norm.data_ptr()
        model.width = self.width

    def run(  # noqa: PLR0913 (the inputs of layers)
        self,
        x: Tensor,  # (T, D)
        tables: tuple[Tensor, Tensor],  # cos and sin of each RoPE, (G, T, H)
        batch: "Batch",
        cache: "KVCache",
        *,
        embedding: Tensor | None = None,  # (T, D), for the first layer of a head
        taps: Sequence[int] = (),
    ) -> Decoded:
        given = native_batch(batch)
        kept = [part.data_ptr() for pair in cache.layers for part in pair]
        caches = (structs.POINTER * len(kept))(*kept)
        numbers = (structs.COUNT * len(taps))(*taps)
        features = x.new_empty(len(x), len(taps) * self.width)
        found = Decoded(x.new_empty(x.shape), x.new_empty(x.shape), features)
        cos, sin = (table.to(x.dtype).contiguous() for table in tables)
        tensors = {"x": x.contiguous(), "cos": cos, "sin": sin, **found._asdict()}
        if embedding is not None:
            tensors["embedding"] = embedding.contiguous()
        forward = structs.Forward(tap_count=len(taps), threads=torch.get_num_threads())
        forward.batch = ctypes.addressof(given)
        forward.caches = ctypes.addressof(caches)
        forward.taps = ctypes.addressof(numbers)
        for name, tensor in tensors.items():
            setattr(forward, name, tensor.data_ptr())
        load().function("decode", x.dtype)(ctypes.byref(self._model), ctypes.byref(forward))
        return found
