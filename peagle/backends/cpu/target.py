"""Described decoders in one native call.

Shapes: T rows, E hidden, F feature layers, R rows, V vocabulary, H head size, G tables of RoPE.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.backends.cpu.decoder import Decoder, RotaryTable, native_layer
from peagle.backends.cpu.matrix import CpuLinear, Place, Weights, quantize_weights
from peagle.backends.cpu.screen import Screen, fits_screen
from peagle.backends.cpu.structs import ACTIVATIONS, PRODUCTS, Layer, Model
from peagle.model.base_target import TargetOutput
from peagle.model.described import HEAD, NORM, Described, DescribedTarget

if TYPE_CHECKING:
    from peagle.backends.batch import Batch
    from peagle.backends.cpu.backend import Keep
    from peagle.backends.kv_cache import KVCache

# A layer's norms by their names in structs.py; those of queries and keys are there or not.
NORMS = {"input": "input_layernorm", "mlp_input": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "input": "input_layernorm",
    "attention": "post_attention_layernorm",
    "mlp_input": "pre_feedforward_layernorm",
    "mlp": "post_feedforward_layernorm",
}
SCREEN = "screen"  # the head once more, in int8
QK_NORMS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}


class NativeTarget:
    """A described target whose layers run in one native call."""

    def __init__(self, target: DescribedTarget, keep: "Keep") -> None:
        config = self.config = target.config
        self.embedding = target.embedding
        weights = keep(target, lambda place: _products(target, place))
        layers = [_layer(target, number, weights) for number in range(target.num_layers)]
        model = Model(head_dim=config.head_dim, eps=config.rms_norm_eps)
        model.scale = config.attention_scale
        model.activation = ACTIVATIONS.index(config.activation)
        self.decoder = Decoder(layers, _norm(config, target.tensors[NORM]), model)
        self.head = CpuLinear(weights[HEAD], None)
        rounded = weights.get(SCREEN)
        self.screen = rounded and Screen(self.head, CpuLinear(rounded, None))
        rotaries = [rope.rotary(config.head_dim) for rope in config.ropes]
        self.rotaries = [RotaryTable(rotary, self.embedding.dtype) for rotary in rotaries]
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype)

    @torch.no_grad()
    def forward(self, batch: "Batch", cache: "KVCache", taps: Sequence[int]) -> TargetOutput:
        """As `TargetModel.forward`."""
        x = F.embedding(batch.ids, self.embedding)
        if self.config.embedding_scale != 1.0:
            x *= self.embedding_scale
        tables = [rotary(batch.positions) for rotary in self.rotaries]
        cos, sin = (torch.cat(each) for each in zip(*tables, strict=True))
        found = self.decoder.run(x, (cos, sin), batch, cache, taps=taps)
        return TargetOutput(found.normed, found.features)

    @torch.no_grad()
    def logits(self, hidden: Tensor, *, largest: bool = False) -> Tensor:
        """As `TargetModel.logits`."""
        if largest and self.screen:
            return self.screen.logits(hidden)
        logits: Tensor = self.head(hidden)
        if cap := self.config.logit_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _products(target: DescribedTarget, place: Place) -> dict[str, Weights]:
    """The weights of all products, by their names, laid out: one after another in the target's
    dtype, so that only one exists twice."""
    kind = target.quantize
    layers = range(target.num_layers)
    names = [f"model.layers.{layer}.{path}.weight" for layer in layers for path in PRODUCTS]
    weights = {n: quantize_weights(target.tensors[n].to(target.dtype), kind, place) for n in names}
    head = target.tensors.get(HEAD, target.embedding)  # as transformers, whatever the config says
    head = head.to(target.dtype)
    weights[HEAD] = quantize_weights(head, kind and "int8", place)
    if kind is None and fits_screen(head) and not target.config.logit_softcap:
        weights[SCREEN] = quantize_weights(head, "int8", place)
    return weights


def _layer(target: DescribedTarget, number: int, kept: Mapping[str, Weights]) -> Layer:
    """A layer for the library."""
    config = target.config
    weights = target.layer_weights(number)
    products = {}
    for path in PRODUCTS:
        bias = weights[f"{path}.bias"] if path.partition(".")[2] in config.biased else None
        products[path] = CpuLinear(kept[f"model.layers.{number}.{path}.weight"], bias)
    paths = SANDWICH_NORMS if config.sandwich else NORMS
    if config.qk_norm:
        paths = paths | QK_NORMS
    norms = {name: _norm(config, weights[f"{path}.weight"]) for name, path in paths.items()}
    layer = config.layers[number]
    return native_layer(products, norms, window=layer.window, rope=layer.rope)


def _norm(config: Described, weight: Tensor) -> Tensor:
    """The factors of a norm; summed in float32 where the weights are one less."""
    return weight.float() + 1 if config.sandwich else weight
