"""Drafters on a CPU: all layers of a head in one native call.

Shapes: T rows, F feature layers, E target hidden, D drafter hidden, R rows, V draft vocabulary.
"""

from copy import deepcopy

import torch
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.cpu.attention import CpuAttend
from peagle.backends.cpu.decoder import Decoder
from peagle.backends.cpu.matrix import CpuLinear, replace_linears
from peagle.backends.kv_cache import KVCache
from peagle.backends.own_code import OwnCodeDrafter
from peagle.model.drafter import Drafter, DrafterOutput
from peagle.model.layers import head_size


class GenericDrafter(OwnCodeDrafter):
    """A drafter by its own code, but for its products and its attention.

    In bfloat16 the products have int8 weights: whatever is drafted, the target's output is the
    same. Those of `fc` stay: a product of int8 weights may round its inputs to 8 bits, and a few of
    a target's features are many times as large as the others.
    """

    def __init__(self, drafter: Drafter) -> None:
        tensors = [*drafter.parameters(), *drafter.buffers()]
        copy = deepcopy(drafter, {id(tensor): tensor for tensor in tensors})
        copy._modules["fc"] = CpuLinear.of(drafter.fc)
        bf16 = drafter.norm.weight.dtype == torch.bfloat16
        replace_linears(copy, CpuLinear.int8 if bf16 else CpuLinear.of)
        super().__init__(copy, CpuAttend)


class NativeDrafter(GenericDrafter):
    """A drafter whose layers run in one native call: those with SiLU."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        sizes = drafter.config.transformer
        size, eps = head_size(sizes), sizes.rms_norm_eps
        self.decoder = Decoder(list(self.drafter.layers), drafter.norm, size, eps, size**-0.5)

    @torch.no_grad()
    def forward(self, batch: Batch, features: Tensor, cache: KVCache) -> DrafterOutput:
        """As `DrafterModel.forward`."""
        tables = self.drafter.rotary(features, batch.positions[None])
        embedding = self.drafter.embed(batch.ids)
        found = self.decoder.run(features, tables, batch, cache, embedding=embedding)
        recurrent = found.normed if self.drafter.config.norm_output else found.out
        return DrafterOutput(found.normed, recurrent)
