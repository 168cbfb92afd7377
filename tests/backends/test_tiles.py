"""A target in tiles: always as many rows, and what comes back is that of the rows asked for."""

import random
from collections.abc import Sequence

import pytest
import torch
from packed import random_rows
from torch import Tensor

from peagle.backends.batch import Batch, Span
from peagle.backends.kv_cache import KVCache
from peagle.backends.tiles import ROW_TILE, TiledTarget
from peagle.backends.torch import TorchBackend
from peagle.model.target import Target, TargetOutput

POOL, TAPS = 24, (1, 4)


class Reusing:
    """A target that returns the same tensors again and again, as a backend may."""

    def __init__(self, target: Target) -> None:
        self.model = TorchBackend(exact=True).target(target)
        self.rows, self.heads = list[int](), list[int]()
        width = target.embedding.shape[1]
        self.hidden = torch.empty(ROW_TILE, width)
        self.features = torch.empty(ROW_TILE, len(TAPS) * width)
        self.kept = torch.empty(ROW_TILE, len(target.embedding))

    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        self.rows.append(len(batch))
        out = self.model.forward(batch, cache, taps)
        return TargetOutput(self.hidden.copy_(out.hidden), self.features.copy_(out.features))

    def logits(self, hidden: Tensor, *, largest: bool = False) -> Tensor:
        self.heads.append(len(hidden))
        return self.kept.copy_(self.model.logits(hidden, largest=largest))


def new_cache(target: Target) -> KVCache:
    return KVCache(POOL, target.kv_shapes, target.dtype, target.device)


@pytest.mark.parametrize("seed", range(12))
def test_tiles_are_the_whole(target: Target, seed: int) -> None:
    """Prompts, drafts and trees after tokens that were run before."""
    requests = random_rows(random.Random(seed), POOL)
    tiled, whole = Reusing(target), TorchBackend().target(target)
    model, caches = TiledTarget(tiled), (new_cache(target), new_cache(target))
    past = [
        Span(one.span.blocks, 0, [(7 * at + i) % 128 for at in range(one.span.start)])
        for i, one in enumerate(requests)
        if one.span.start
    ]
    for spans in filter(None, (past, [one.span for one in requests])):
        batch = Batch.of(spans)
        found = model.forward(batch, caches[0], TAPS)
        wanted = whole.forward(batch, caches[1], TAPS)
        assert found.hidden.shape == wanted.hidden.shape
        torch.testing.assert_close(found.hidden, wanted.hidden, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.features, wanted.features, atol=1e-5, rtol=1e-4)
        logits = model.logits(found.hidden)
        torch.testing.assert_close(logits, whole.logits(wanted.hidden), atol=1e-5, rtol=1e-4)
    assert set(tiled.rows) == set(tiled.heads) == {ROW_TILE}


def test_rows_are_the_same_to_the_bit_whatever_is_beside_them(target: Target) -> None:
    """Draft trees, too."""
    requests = random_rows(random.Random(4), POOL)
    model = TiledTarget(TorchBackend(exact=True).target(target))
    together = model.forward(Batch.of([one.span for one in requests]), new_cache(target), TAPS)
    first = 0
    for one in requests:
        alone = model.forward(Batch.of([one.span]), new_cache(target), TAPS)
        rows = slice(first, first + len(one.visible))
        assert torch.equal(alone.hidden, together.hidden[rows])
        assert torch.equal(alone.features, together.features[rows])
        first = rows.stop
