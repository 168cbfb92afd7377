"""The batch-invariant mode, for kernels that choose their loops by the number of rows: a target is
run in tiles of as many rows, whatever the batch. Then output is bit-identical at any batch size
and K.

Shapes: T rows, E target hidden, R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.backends.base import TargetModel
from peagle.backends.batch import Batch
from peagle.backends.kv_cache import KVCache
from peagle.model.attention import ROW_TILE
from peagle.model.target import TargetOutput


class TiledTarget:
    """A `TargetModel` that runs another one a tile of ROW_TILE rows at a time."""

    def __init__(self, model: TargetModel) -> None:
        self.model = model

    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        """As `TargetModel.forward`."""
        hidden, features = list[Tensor](), list[Tensor]()
        for tile in batch.tiles(ROW_TILE, cache.padding):
            out = self.model.forward(tile, cache, taps)
            hidden.append(out.hidden.clone())  # the next tile may overwrite it
            features.append(out.features.clone())
        rows = len(batch)
        return TargetOutput(torch.cat(hidden)[:rows], torch.cat(features)[:rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, E) → (R, V)"""
        padded = F.pad(hidden, (0, 0, 0, -len(hidden) % ROW_TILE))
        tiles = [self.model.logits(tile).clone() for tile in padded.split(ROW_TILE)]
        return torch.cat(tiles)[: len(hidden)]
