"""The reference backend: plain torch, for every dtype and device. The others are tested against it.

Shapes: T rows, N query heads, M key/value heads, H head size, S keys.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.backends.base import TargetModel
from peagle.backends.batch import BLOCK, Batch
from peagle.backends.kv_cache import KVCache
from peagle.backends.own_code import OwnCodeDrafter, OwnCodeTarget
from peagle.backends.tiles import ROW_TILE, TiledTarget
from peagle.model.attention import AttentionSpec, attention, causal_mask
from peagle.model.base_target import BaseTarget
from peagle.model.drafter import Drafter

if TYPE_CHECKING:
    from peagle.model.target import Target

KEY_BLOCK = 512  # keys of attention: the block length of torch's CPU kernel


class View(NamedTuple):
    """Rows that see the same keys, causally."""

    rows: slice  # of the batch
    slots: Tensor  # (S,) of positions 0 … S − 1, the last row's own at the end


class TorchAttend:
    """An `Attend` for one batch over a cache. `exact`: no row depends on the other rows."""

    def __init__(self, batch: Batch, cache: KVCache, *, exact: bool = False) -> None:
        device = cache.device
        self.cache = cache
        self.exact = exact
        self.slot_mapping = batch.slot_mapping.to(device)
        self.views = [View(rows, slots.to(device)) for rows, slots in views(batch)]
        self.masks = dict[tuple[int, int | None], Tensor | None]()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        kept = self.cache.write(layer, self.slot_mapping, k, v)
        keys, values = (blocks.flatten(0, 1) for blocks in kept)
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
    for number, count in enumerate(batch.query_lens.tolist()):
        slots = (batch.block_tables[number][:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        rows = slice(first, first + count)
        first += count
        if batch.tails is None or not (batch.tails[rows] >= 0).any():
            yield View(rows, slots[: batch.seq_lens[number]])
            continue
        for row in range(rows.start, rows.stop):
            tail = batch.tails[row][batch.tails[row] >= 0]
            seen = int(batch.positions[row]) + 1 - len(tail)
            yield View(slice(row, row + 1), torch.cat([slots[:seen], tail]))


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """`attention` on whole tiles of queries, over keys that fill whole blocks, under a mask made by
    `tiled_mask`. A row's last bits then do not depend on how many rows or later keys there are:
    kernels choose their loops by both."""
    queries = F.pad(q, (0, 0, 0, 0, 0, -len(q) % ROW_TILE))
    missing = (0, 0, 0, 0, 0, -len(k) % KEY_BLOCK)
    return attention(queries, F.pad(k, missing), F.pad(v, missing), mask, spec)[: len(q)]


def tiled_mask(mask: Tensor | None, tokens: int, keys: int, device: torch.device) -> Tensor:
    """A mask (T, S), None = all visible, for whole tiles of rows and blocks of keys. Rows after the
    last token see everything; keys after the last one are seen by no other row."""
    if mask is None:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=device)
    mask = F.pad(mask, (0, -keys % KEY_BLOCK))
    return F.pad(mask, (0, 0, 0, -tokens % ROW_TILE), value=True)


class TorchBackend:
    """See `Backend`."""

    name = "torch"

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    def target(self, target: BaseTarget, *, own: bool = False) -> TargetModel:  # noqa: ARG002
        if self.exact:
            exact = cast("Target", target).exact()
            return TiledTarget(OwnCodeTarget(exact, partial(TorchAttend, exact=True)))
        return OwnCodeTarget(target, TorchAttend)

    def drafter(self, drafter: Drafter) -> OwnCodeDrafter:
        return OwnCodeDrafter(drafter, TorchAttend)  # no output depends on a draft's bits
