"""Drafters on a CPU: all layers of a head in one native call.

Shapes: T rows, F feature layers, E target hidden, D drafter hidden, R rows, V draft vocabulary.
"""

from copy import deepcopy
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from peagle.backends.cpu import structs
from peagle.backends.cpu.attention import CpuAttend
from peagle.backends.cpu.decoder import Decoder, RotaryTable, native_layer
from peagle.backends.cpu.matrix import CpuLinear, replace_linears
from peagle.backends.cpu.target import NORMS, QK_NORMS
from peagle.backends.own_code import OwnCodeDrafter
from peagle.model.layers import DrafterOutput, FirstLayer, Layer

if TYPE_CHECKING:
    from peagle.backends.batch import Batch
    from peagle.backends.kv_cache import KVCache
    from peagle.model.drafter import Drafter

HEAD_NORMS = NORMS | QK_NORMS | {"hidden": "hidden_norm"}  # a layer may have fewer


class GenericDrafter(OwnCodeDrafter):
    """A drafter by its own code, but for its products and its attention.

    In bfloat16 the products have int8 weights: whatever is drafted, the target's output is the
    same. Those of `fc` stay: a product of int8 weights may round its inputs to 8 bits, and a few of
    a target's features are many times as large as the others.
    """

    def __init__(self, drafter: "Drafter") -> None:
        tensors = [*drafter.parameters(), *drafter.buffers()]
        copy = deepcopy(drafter, {id(tensor): tensor for tensor in tensors})
        copy._modules["fc"] = CpuLinear.of(drafter.fc)
        kind = "int8" if drafter.norm.weight.dtype == torch.bfloat16 else None
        replace_linears(copy, lambda linear: CpuLinear.of(linear, kind))
        super().__init__(copy, CpuAttend)


class NativeDrafter(GenericDrafter):
    """A drafter whose layers run in one native call: those with SiLU."""

    def __init__(self, drafter: "Drafter") -> None:
        super().__init__(drafter)
        sizes = drafter.config.transformer
        model = structs.Model(head_dim=sizes.head_dim, eps=sizes.rms_norm_eps)
        model.scale = sizes.head_dim**-0.5
        layers = [_decoder_layer(cast(Layer, layer)) for layer in self.drafter.layers]
        self.decoder = Decoder(layers, drafter.norm.weight, model)
        self.rotary = RotaryTable(drafter.rotary, drafter.norm.weight.dtype)

    @torch.no_grad()
    def forward(self, batch: "Batch", features: Tensor, cache: "KVCache") -> DrafterOutput:
        """As `DrafterModel.forward`."""
        tables = self.rotary(batch.positions)
        embedding = self.drafter.embed(batch.ids)
        found = self.decoder.run(features, tables, batch, cache, embedding=embedding)
        recurrent = found.normed if self.drafter.config.norm_output else found.out
        return DrafterOutput(found.normed, recurrent)


def _decoder_layer(layer: Layer) -> structs.Layer:
    """A drafter's layer for the library; its linear layers are native ones."""
    weights = dict(layer.named_parameters())
    products = {path: cast(CpuLinear, layer.get_submodule(path)) for path in structs.PRODUCTS}
    paths = {name: f"{path}.weight" for name, path in HEAD_NORMS.items()}
    norms: dict[str, Tensor] = {n: weights[path] for n, path in paths.items() if path in weights}
    normed = isinstance(layer, FirstLayer) and layer.norm_before_residual
    window = layer.self_attn.spec.window or 0
    return native_layer(products, norms, normed_residual=normed, window=window)
