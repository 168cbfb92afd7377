"""The target's decoder layers as our own (model/layers.py), where they are Llama's or Qwen3's.

For the few rows of decoding the small operations of a layer, and Python between them, take about as
long as its matrix products: ours are fewer, and where all of a layer is native, one call.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model

from peagle.model.layers import Layer, Rotation, run_natively
from peagle.model.packed import StandIn

if TYPE_CHECKING:
    from peagle.model.target import Step


class LeanLayer(Layer):
    """In the place of a decoder layer of transformers, with its weights under the same names."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        with torch.device("meta"):  # the weights are the other layer's
            super().__init__(config)
        self.index = index

    def forward(  # type: ignore[override]  # as transformers' decoders call their layers
        self,
        hidden_states: Tensor,  # (1, T, E)
        *,
        position_embeddings: tuple[Tensor, Tensor],
        peagle_step: "Step",
        **_: Any,  # masks and caches of other attention kernels
    ) -> Tensor:
        if peagle_step.rotation is None:
            peagle_step.rotation = Rotation.of(*position_embeddings)
        x = super().forward(hidden_states[0], peagle_step.rotation, peagle_step, self.index)
        return x[None]


def lean(layers: nn.ModuleList, config: PretrainedConfig) -> None:
    """Put ours in the place of the layers that are of a kind we have; the others stay."""
    for index, theirs in enumerate(layers):
        if type(theirs) in (LlamaDecoderLayer, Qwen3DecoderLayer):
            ours = LeanLayer(config, index)
            window = getattr(theirs.self_attn, "sliding_window", None)
            if window is None and _biases(ours) == _biases(theirs):
                _take(ours, theirs)
                layers[index] = ours.eval()


def run_whole(
    decoder: nn.Module, ids: Tensor, positions: Tensor, step: "Step", taps: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """What leaves the decoder, (T, E), and what enters each of the layers `taps`, (T, F·E), by one
    native call; None when there is a layer that it does not take. ids, positions (T,)."""
    if type(decoder) not in (LlamaModel, Qwen3Model):  # an embedding, layers and a norm
        return None
    llama = cast(LlamaModel, decoder)
    layers = cast(list[Layer], list(llama.layers))
    if any(type(layer) is not LeanLayer for layer in layers):
        return None
    x = llama.embed_tokens(ids)
    rotate = Rotation.of(*llama.rotary_emb(x, positions[None]))
    ran = run_natively(layers, x, rotate, step, 0, taps=taps)
    return None if ran is None else (llama.norm(ran[0]), ran[1])


def _biases(layer: nn.Module) -> dict[str, bool]:
    """Which products of a layer add one, whatever form their weights are in."""
    kinds = (nn.Linear, StandIn)
    parts = ((name, part) for name, part in layer.named_modules() if isinstance(part, kinds))
    return {name: part.bias is not None for name, part in parts}


def _take(ours: nn.Module, theirs: nn.Module) -> None:
    """The other layer's linear layers as they are, and the weights of its norms."""
    for name, module in list(ours.named_modules()):
        if isinstance(module, nn.Linear):
            ours.set_submodule(name, theirs.get_submodule(name))
        elif isinstance(module, nn.RMSNorm):
            module.weight = cast(nn.Parameter, theirs.get_submodule(name).weight)
