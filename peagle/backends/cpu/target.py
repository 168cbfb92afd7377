"""The layers of Llama and Qwen3 in one native call.

Shapes: T rows, E hidden, F feature layers, R rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model

from peagle.backends.batch import Batch
from peagle.backends.cpu.decoder import Decoder
from peagle.backends.cpu.matrix import CpuLinear
from peagle.backends.cpu.structs import PRODUCTS
from peagle.backends.kv_cache import KVCache
from peagle.model.layers import head_size
from peagle.model.target import Target, TargetOutput

MODELS = (LlamaForCausalLM, Qwen3ForCausalLM)
DECODERS = (LlamaModel, Qwen3Model)
LAYERS = (LlamaDecoderLayer, Qwen3DecoderLayer)


class NativeTarget:
    """A Llama or Qwen3 (`is_native`) whose layers run in one native call."""

    def __init__(self, target: Target) -> None:
        self.target, config = target, target.config
        layers: list[Any] = list(target.layers)
        scale = layers[0].self_attn.scaling
        norm = cast(LlamaModel, target.decoder).norm
        self.decoder = Decoder(layers, norm, head_size(config), config.rms_norm_eps, scale)
        self.head = CpuLinear.of(target.model.lm_head)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        """As `TargetModel.forward`."""
        model = cast(LlamaModel, self.target.decoder)
        x = model.embed_tokens(batch.ids)
        tables = model.rotary_emb(x, batch.positions[None])
        found = self.decoder.run(x, tables, batch, cache, taps=taps)
        return TargetOutput(found.normed, found.features)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, E) → (R, V)"""
        return cast(Tensor, self.head(hidden))


def is_native(target: Target) -> bool:
    """Whether `NativeTarget` runs the target: a Llama or Qwen3 as it was published, each of whose
    layers sees all keys, and whose products are plain or ours."""
    if type(target.model) not in MODELS or type(target.decoder) not in DECODERS:
        return False
    if target.config.hidden_act != "silu":
        return False
    products = [target.model.lm_head]
    layers: list[Any] = list(target.layers)
    for layer in layers:
        window = type(layer) is Qwen3DecoderLayer and layer.self_attn.sliding_window
        if type(layer) not in LAYERS or window:
            return False
        products += [layer.get_submodule(path) for path in PRODUCTS]
    return all(_is_plain(part, target.dtype) for part in products)


def _is_plain(part: nn.Module, dtype: torch.dtype) -> bool:
    """The code of a subclass of nn.Linear is not known, so it is not plain."""
    if isinstance(part, CpuLinear):
        return part.weights.dtype == dtype
    return type(part) is nn.Linear and part.weight.dtype == dtype
