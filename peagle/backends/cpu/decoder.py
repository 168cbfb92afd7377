"""All layers of a Llama or Qwen3, or of a head of theirs, and the norm after them, in one call.

Shapes: T rows, D hidden, F feature layers, H head size.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.cpu import structs
from peagle.backends.cpu.attention import native_batch
from peagle.backends.cpu.library import load
from peagle.backends.cpu.matrix import CpuLinear
from peagle.backends.kv_cache import KVCache
from peagle.model.layers import FirstLayer


class Decoded(NamedTuple):
    """A decoder's outputs for T rows."""

    out: Tensor  # (T, D) leaves the last layer
    normed: Tensor  # (T, D)
    features: Tensor  # (T, F·D) enters the layers `taps`


class Decoder:
    """Layers of one shape, ready for the library. It reads their weights where they are."""

    def __init__(
        self, layers: Sequence[Any], norm: Any, head_size: int, eps: float, scale: float
    ) -> None:
        """`layers` of transformers or of a head; `norm` is the one after them."""
        self.width: int = norm.weight.shape[0]
        self._alive: list[Any] = [norm.weight]
        self._layers = (structs.Layer * len(layers))()
        for layer_struct, layer in zip(self._layers, layers, strict=True):
            weights = dict(layer.named_parameters())
            for path in structs.PRODUCTS:
                linear = CpuLinear.of(layer.get_submodule(path))
                setattr(layer_struct, path, linear.matrix)
                self._alive.append(linear)
            for path in weights.keys() & set(structs.NORMS):
                setattr(layer_struct, path, weights[path].data_ptr())
                self._alive.append(weights[path])
            normed = isinstance(layer, FirstLayer) and layer.norm_before_residual
            layer_struct.normed_residual = normed
        first = ctypes.addressof(self._layers)
        last = norm.weight.data_ptr()
        self._model = structs.Model(first, last, len(layers), self.width, head_size, eps, scale)

    def run(  # noqa: PLR0913 (what layers are run on)
        self,
        x: Tensor,  # (T, D)
        tables: tuple[Tensor, Tensor],  # cos and sin of RoPE, each (1, T, H)
        batch: Batch,
        cache: KVCache,
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
        decode = load().function("decode", x.dtype)
        decode(ctypes.byref(self._model), ctypes.byref(forward))
        return found
