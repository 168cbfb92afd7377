"""The reference backend: plain torch, for every dtype and device. The others are tested against it.

Shapes: T rows, N query heads, M key/value heads, H head size, S keys.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.backends.base import TargetModel
from peagle.backends.batch import BLOCK, Batch
from peagle.backends.kv_cache import KVCache
from peagle.backends.tiles import TiledTarget, tiled_attention, tiled_mask
from peagle.model.attention import AttentionSpec, attention, causal_mask
from peagle.model.drafter import Drafter, DrafterOutput
from peagle.model.target import Target, TargetOutput


class View(NamedTuple):
    """Rows that see the same keys, causally."""

    rows: slice  # of the batch
    slots: Tensor  # (S,) of positions 0 … S − 1, the last row's own at the end


class TorchAttend:
    """An `Attend` for one batch over a cache. `exact`: no row depends on the rows beside it."""

    def __init__(self, batch: Batch, cache: KVCache, *, exact: bool) -> None:
        device = cache.device
        self.cache, self.exact = cache, exact
        self.slot_mapping = batch.slot_mapping.to(device)
        self.views = [View(rows, slots.to(device)) for rows, slots in views(batch)]
        self.masks = dict[tuple[int, int | None], Tensor | None]()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.cache.write(layer, self.slot_mapping, k, v)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        run = tiled_attention if self.exact else attention
        for number, (rows, slots) in enumerate(self.views):
            mask = self._mask(number, spec.window, q.device)
            out[rows] = run(q[rows], keys[slots], values[slots], mask, spec)
        return out

    def _mask(self, number: int, window: int | None, device: torch.device) -> Tensor | None:
        """(rows, S) of one view; made once for all layers with that window."""
        if (number, window) not in self.masks:
            rows, slots = self.views[number]
            count = rows.stop - rows.start
            mask = causal_mask(len(slots) - count, count, window, device)
            if self.exact:
                mask = tiled_mask(mask, count, len(slots), device)
            self.masks[number, window] = mask
        return self.masks[number, window]


def views(batch: Batch) -> Iterator[View]:
    """A view for each request without a tree, and one for each row of a tree."""
    first = 0
    lengths = zip(
        batch.block_tables, batch.query_lens.tolist(), batch.seq_lens.tolist(), strict=True
    )
    for table, count, reached in lengths:
        slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        if batch.tails is None or not (batch.tails[first : first + count] >= 0).any():
            yield View(slice(first, first + count), slots[:reached])
        else:
            for row in range(first, first + count):
                tail = batch.tails[row]
                tail = tail[tail >= 0]
                seen = int(batch.positions[row]) + 1 - len(tail)
                yield View(slice(row, row + 1), torch.cat([slots[:seen], tail]))
        first += count


class TorchTarget:
    """A target run by its own code."""

    def __init__(self, target: Target, *, exact: bool) -> None:
        self.model, self.exact = target, exact

    @torch.no_grad()
    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        attend = TorchAttend(batch, cache, exact=self.exact)
        device = self.model.device
        return self.model.forward(batch.ids.to(device), batch.positions.to(device), attend, taps)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class TorchDrafter:
    """A drafter run by its own code."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    @torch.no_grad()
    def forward(self, batch: Batch, features: Tensor, cache: KVCache) -> DrafterOutput:
        attend = TorchAttend(batch, cache, exact=False)  # no output depends on a draft's bits
        ids, positions = batch.ids.to(features.device), batch.positions.to(features.device)
        out: DrafterOutput = self.drafter(ids, features, positions, attend)
        return out


class TorchBackend:
    """See `Backend`."""

    name = "torch"

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    def target(self, target: Target, *, own: bool = False) -> TargetModel:  # noqa: ARG002
        if self.exact:
            return TiledTarget(TorchTarget(target.exact(), exact=True))
        return TorchTarget(target, exact=False)

    def drafter(self, drafter: Drafter) -> TorchDrafter:
        return TorchDrafter(drafter)
