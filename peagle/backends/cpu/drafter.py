"""Drafters on a CPU: all layers of a head in one native call.

Shapes: T rows, F feature layers, E target hidden, D drafter hidden, R rows, V draft vocabulary.
"""

from copy import copy

import torch
from torch import Tensor

from peagle.backends.batch import Batch
from peagle.backends.cpu.attention import CpuAttend
from peagle.backends.cpu.decoder import Decoder
from peagle.backends.cpu.matrix import CpuLinear
from peagle.backends.kv_cache import KVCache
from peagle.model.drafter import Drafter, DrafterOutput
from peagle.model.layers import head_size


class GenericDrafter:
    """A drafter by its own code, but for its largest products and its attention."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = copy(drafter)  # of the same parameters
        self.drafter._modules = dict(drafter._modules)
        self.drafter._modules["fc"] = CpuLinear.of(drafter.fc)
        self.drafter._modules["lm_head"] = CpuLinear.of(drafter.lm_head)

    @torch.no_grad()
    def forward(self, batch: Batch, features: Tensor, cache: KVCache) -> DrafterOutput:
        """As `DrafterModel.forward`."""
        attend = CpuAttend(batch, cache)
        out: DrafterOutput = self.drafter(batch.ids, features, batch.positions, attend)
        return out


class NativeDrafter(GenericDrafter):
    """A drafter whose layers run in one native call: those with SiLU."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        sizes = drafter.config.transformer
        size, eps = head_size(sizes), sizes.rms_norm_eps
        self.decoder = Decoder(list(drafter.layers), drafter.norm, size, eps, size**-0.5)

    @torch.no_grad()
    def forward(self, batch: Batch, features: Tensor, cache: KVCache) -> DrafterOutput:
        """As `DrafterModel.forward`."""
        tables = self.drafter.rotary(features, batch.positions[None])
        embedding = self.drafter.embed(batch.ids)
        found = self.decoder.run(features, tables, batch, cache, embedding=embedding)
        recurrent = found.normed if self.drafter.config.norm_output else found.out
        return DrafterOutput(found.normed, recurrent)
