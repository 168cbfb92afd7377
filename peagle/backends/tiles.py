"""The batch-invariant mode, for kernels that choose their loops by the number of rows: a target is
run in tiles of as many rows, whatever the batch. Then output is bit-identical at any batch size
and K.

Shapes: T rows, E target hidden, R rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.model.base_target import TargetOutput

if TYPE_CHECKING:
    from peagle.backends.base import TargetModel
    from peagle.backends.batch import Batch
    from peagle.backends.kv_cache import KVCache

ROW_TILE = 8  # rows of a matrix product


class TiledTarget:
    """A `TargetModel` that runs another one a tile of ROW_TILE rows at a time."""

    def __init__(self, model: "TargetModel") -> None:
        self.model = model

    def forward(self, batch: "Batch", cache: "KVCache", taps: Sequence[int]) -> TargetOutput:
        """As `TargetModel.forward`."""
        outputs = list[TargetOutput]()
        for tile in tiles_of(batch, ROW_TILE, cache.padding):
            out = self.model.forward(tile, cache, taps)
            outputs.append(TargetOutput(*(part.clone() for part in out)))  # it may be overwritten
        joined = (torch.cat(parts)[: len(batch)] for parts in zip(*outputs, strict=True))
        return TargetOutput(*joined)

    def logits(self, hidden: Tensor, *, largest: bool = False) -> Tensor:
        """As `TargetModel.logits`."""
        padded = F.pad(hidden, (0, 0, 0, -len(hidden) % ROW_TILE))
        tiles = [
            self.model.logits(tile, largest=largest).clone() for tile in padded.split(ROW_TILE)
        ]
        return torch.cat(tiles)[: len(hidden)]


def tiles_of(batch: "Batch", rows: int, padding: int) -> Iterator["Batch"]:
    """A batch in parts of exactly `rows` rows; rows of block `padding` fill up the last."""
    owner = torch.arange(len(batch.query_lens)).repeat_interleave(batch.query_lens)
    for begin in range(0, len(batch), rows):
        yield _part(batch, slice(begin, begin + rows), owner).padded(rows, padding)


def _part(batch: "Batch", rows: slice, owner: Tensor) -> "Batch":
    """Some rows, of the requests that own them."""
    requests, query_lens = owner[rows].unique_consecutive(return_counts=True)
    positions = batch.positions[rows]
    seq_lens = positions + 1
    tails = None if batch.tails is None else batch.tails[rows]
    if tails is not None:
        seq_lens = seq_lens - (tails >= 0).sum(-1)
    return replace(
        batch,
        ids=batch.ids[rows],
        positions=positions,
        slot_mapping=batch.slot_mapping[rows],
        block_tables=batch.block_tables[requests],
        query_lens=query_lens,
        seq_lens=seq_lens[query_lens.cumsum(0) - 1],
        tails=tails,
    )
