"""Attention of packed requests and draft trees over cached keys is by each row's definition."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from packed import Keys, Rows, by_definition, chain, random_keys, random_rows, tree
from torch import Tensor

from peagle.backends.batch import BLOCK, Batch, Span, slots_of
from peagle.backends.kv_cache import KVCache
from peagle.backends.torch import KEY_BLOCK, TorchAttend
from peagle.model.attention import AttentionSpec, CausalAttend, HeadShape

HEADS, POOL = 6, 24
GROUPED = HeadShape(2, 8, 8)
SHAPES = [GROUPED, HeadShape(6, 8, 8), HeadShape(1, 8, 5)]
SCALE = GROUPED.key_size**-0.5
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window of one": {"window": 1},
    "a window": {"window": 7},
    "a long window": {"window": 50},
    "soft caps": {"softcap": 1.5},
    "soft caps in a window": {"softcap": 1.5, "window": 5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -4.0])},
    "sinks in a window": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -4.0]), "window": 5},
}


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


def cache_of(shape: HeadShape, blocks: int = POOL) -> KVCache:
    """Full of numbers that no row may see."""
    cache = KVCache(blocks, [shape], torch.float32, torch.device("cpu"))
    for layer in cache.layers[0]:
        layer.fill_(1e4)
    return cache


def attend(
    cache: KVCache, rows: list[Rows], keys: Keys, spec: AttentionSpec, *, exact: bool = False
) -> Tensor:
    """The rows, after the tokens that were run before."""
    for one, (k, v) in zip(rows, keys.past, strict=True):
        cache.write(0, torch.tensor(slots_of(one.span.blocks, 0, len(k)), dtype=torch.int64), k, v)
    batch = Batch.of([one.span for one in rows])
    return TorchAttend(batch, cache, exact=exact)(0, keys.q, keys.k, keys.v, spec)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_random_batches_of_chains_and_trees(kind: str, exact: bool) -> None:
    chance, trees = random.Random(kind), 0
    for seed in range(25):
        shape = SHAPES[seed % len(SHAPES)]
        rows = random_rows(chance, POOL)
        keys = random_keys(rows, HEADS, shape, seed)
        spec = AttentionSpec(SCALE, **KINDS[kind])
        found = attend(cache_of(shape), rows, keys, spec, exact=exact)
        close(found, by_definition(rows, keys, spec))
        trees += sum(bool(one.span.tails) for one in rows)
    assert trees > 15


def sequence(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    keys = random_keys([chain([0] * 99, 0, tokens)], HEADS, GROUPED, seed)
    return keys.q, keys.k, keys.v


def run(cache: KVCache, spans: list[Span], packed: list[Tensor], spec: AttentionSpec) -> Tensor:
    return TorchAttend(Batch.of(spans), cache, exact=False)(0, *packed, spec)


@pytest.mark.parametrize("blocks", [[0, 1, 2], [6, 2, 7], [3, 4, 5]])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_sequences_written_over_several_rounds(blocks: list[int], window: int | None) -> None:
    """Alone and beside another request whose blocks lie between."""
    spec, cache = AttentionSpec(SCALE, window), cache_of(GROUPED, 12)
    one, two = sequence(45, 0), sequence(40, 1)
    other = [block for block in range(12) if block not in blocks][:3]
    outputs: list[list[Tensor]] = [[], []]
    for start, end in ((0, 7), (7, 8), (8, 23), (23, 40)):
        spans = [Span(own, start, [0] * (end - start)) for own in (blocks, other)]
        packed = [torch.cat([a[start:end], b[start:end]]) for a, b in zip(one, two, strict=True)]
        for mine, part in zip(outputs, run(cache, spans, packed, spec).chunk(2), strict=True):
            mine.append(part)
    last = run(cache, [Span(blocks, 40, [0] * 5)], [x[40:] for x in one], spec)
    close(torch.cat([*outputs[0], last]), CausalAttend()(0, *one, spec))
    close(torch.cat(outputs[1]), CausalAttend()(0, *two, spec))


def test_rejected_tokens_are_never_read() -> None:
    """Neither those of a chain nor those of a tree."""
    spec, cache = AttentionSpec(SCALE), cache_of(GROUPED, 1)
    q, k, v = sequence(8, 0)
    wrong, parents = sequence(6, 7), [0, 0, 1, 2, 2]
    run(cache, [Span([0], 0, [0] * 4)], [q[:4], k[:4], v[:4]], spec)
    run(cache, [Span([0], 4, [0] * 6)], list(wrong), spec)
    run(cache, [tree([0], 4, parents).span], list(wrong), spec)
    after = run(cache, [Span([0], 4, [0] * 4)], [q[4:], k[4:], v[4:]], spec)
    close(after, CausalAttend()(0, q, k, v, spec)[4:])


def test_a_tile_does_not_depend_on_what_is_beside_it() -> None:
    """The deterministic mode: a row's bits are the same alone, in a tile, and before others."""
    spec, tokens, start = AttentionSpec(SCALE), KEY_BLOCK + 4, KEY_BLOCK - 4
    q, k, v = sequence(tokens, 0)
    blocks, outputs = range(-(-tokens // BLOCK)), list[Tensor]()
    for cuts in ([start, tokens], range(start, tokens + 1), [start, start + 3, tokens]):
        cache = cache_of(GROUPED, len(blocks))
        cache.write(0, torch.arange(start), k[:start], v[:start])
        parts = list[Tensor]()
        for first, end in pairwise(cuts):
            batch = Batch.of([Span(blocks, first, [0] * (end - first))])
            packed = q[first:end], k[first:end], v[first:end]
            parts.append(TorchAttend(batch, cache, exact=True)(0, *packed, spec))
        outputs.append(torch.cat(parts))
    close(outputs[0], CausalAttend()(0, q, k, v, spec)[start:])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
