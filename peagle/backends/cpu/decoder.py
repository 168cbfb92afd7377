"""All layers of a decoder, or of a head, and the norm after them, in one native call.

Shapes: T rows, D hidden, F feature layers, H head size.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.cpu.attention import FLOAT, NativeBatch
from peagle.backends.cpu.library import COUNT, POINTER, load
from peagle.backends.cpu.matrix import CpuLinear, Matrix
from peagle.backends.kv_cache import KVCache

PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("input_norm", "attention_norm", "mlp_input_norm", "mlp_norm", "q_norm", "k_norm")
NORMS += ("hidden_norm",)
ACTIVATIONS = ("silu", "gelu_tanh")


class DecoderLayer(NamedTuple):
    """Weights and facts of one layer, by the names in native/layer.h."""

    products: dict[str, CpuLinear]  # all of PRODUCTS
    norms: dict[str, Tensor]  # those of NORMS that the layer has
    normed_residual: bool = False
    window: int = 0
    rope: int = 0


class _Layer(ctypes.Structure):
    """Mirrors native/layer.h; norms that a layer does not have are None."""

    _fields_ = [(name, Matrix) for name in PRODUCTS]
    _fields_ += [(name, POINTER) for name in NORMS]
    _fields_ += [("normed_residual", COUNT), ("window", COUNT), ("rope", COUNT)]


class _Model(ctypes.Structure):
    """Mirrors native/layer.h."""

    _fields_ = [("layers", POINTER), ("norm", POINTER), ("count", COUNT), ("width", COUNT)]
    _fields_ += [("head", COUNT), ("activation", COUNT), ("eps", FLOAT), ("scale", FLOAT)]


class _Forward(ctypes.Structure):
    """Mirrors native/layer.h."""

    _fields_ = [("batch", POINTER), ("caches", POINTER), ("x", POINTER), ("embedding", POINTER)]
    _fields_ += [("cos", POINTER), ("sin", POINTER), ("taps", POINTER), ("tap_count", COUNT)]
    _fields_ += [("features", POINTER), ("out", POINTER), ("normed", POINTER), ("threads", COUNT)]


class Decoded(NamedTuple):
    """What a decoder makes of T rows."""

    out: Tensor  # (T, D) what leaves the last layer
    normed: Tensor  # (T, D)
    features: Tensor  # (T, F·D) what enters the layers that were asked for


class DecoderShape(NamedTuple):
    """Facts that all layers of a decoder share."""

    head_dim: int
    eps: float
    scale: float  # of attention's scores
    activation: str = "silu"


class Decoder:
    """Layers of one shape, ready for the library. It reads their weights where they are."""

    def __init__(
        self, layers: Sequence[DecoderLayer], norm: Tensor, shape: DecoderShape
    ) -> None:
        """`norm`: weights (D,) of the norm after the layers."""
        self._layers = (_Layer * len(layers))()
        self._alive: list[Any] = [norm.float()]
        for made, layer in zip(self._layers, layers, strict=True):
            norms = {name: weight.float() for name, weight in layer.norms.items()}
            self._alive += [layer.products, norms]
            for name, product in layer.products.items():
                setattr(made, name, product.matrix)
            for name, weight in norms.items():
                setattr(made, name, weight.data_ptr())
            made.normed_residual = layer.normed_residual
            made.window, made.rope = layer.window, layer.rope
        self.width = len(norm)
        self._model = _Model(
            layers=ctypes.addressof(self._layers),
            norm=self._alive[0].data_ptr(),
            count=len(layers),
            width=self.width,
            head=shape.head_dim,
            activation=ACTIVATIONS.index(shape.activation),
            eps=shape.eps,
            scale=shape.scale,
        )

    def run(  # noqa: PLR0913 (what layers are run on)
        self,
        x: Tensor,  # (T, D)
        tables: tuple[Tensor, Tensor],  # cos and sin of each RoPE, each (tables, T, H)
        batch: Batch,
        cache: KVCache,
        *,
        embedding: Tensor | None = None,  # (T, D), for the first layer of a head
        taps: Sequence[int] = (),
    ) -> Decoded:
        x = x.contiguous()
        given = NativeBatch(batch)
        kept = [part.data_ptr() for pair in cache.layers for part in pair]
        caches = (POINTER * len(kept))(*kept)
        numbers = (COUNT * len(taps))(*taps)
        cos, sin = (table.to(x.dtype).contiguous() for table in tables)
        features = x.new_empty(len(x), len(taps) * self.width)
        found = Decoded(torch.empty_like(x), torch.empty_like(x), features)
        forward = _Forward(
            batch=ctypes.addressof(given.struct),
            caches=ctypes.addressof(caches),
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            taps=ctypes.addressof(numbers),
            tap_count=len(taps),
            features=features.data_ptr(),
            out=found.out.data_ptr(),
            normed=found.normed.data_ptr(),
            threads=torch.get_num_threads(),
        )
        if embedding is not None:
            embedding = embedding.contiguous()
            forward.embedding = embedding.data_ptr()
        decode = load().function("decode", x.dtype)
        decode(ctypes.byref(self._model), ctypes.byref(forward))
        return found
