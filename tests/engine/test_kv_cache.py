"""Packed attention over cached rows equals attention over each request's whole sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.engine.kv_cache import SHORT, CachedAttend, KVCache, Span, positions
from peagle.model.attend import AttentionSpec, CausalAttend

HEADS, KV_HEADS, SIZE = 4, 2, 8


def random_qkv(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_chunks_of_two_requests_equal_whole_sequences(window: int | None) -> None:
    spec = AttentionSpec(SIZE**-0.5, window)
    whole = [random_qkv(11, 0), random_qkv(9, 1)]
    cache, outputs = KVCache(3, 16), [list[Tensor](), list[Tensor]()]
    cuts = [[(0, 5), (0, 3)], [(5, 6), (3, 4)], [(6, 11), (4, 9)]]
    for step in cuts:
        spans = [Span(row, lo, hi - lo) for row, (lo, hi) in zip((2, 0), step, strict=True)]
        packed = [
            torch.cat([x[lo:hi] for x, (lo, hi) in zip(kind, step, strict=True)])
            for kind in zip(*whole, strict=True)
        ]
        out = CachedAttend(cache, spans)(0, *packed, spec)
        for mine, part in zip(outputs, out.split([s.length for s in spans]), strict=True):
            mine.append(part)
    for mine, qkv in zip(outputs, whole, strict=True):
        torch.testing.assert_close(torch.cat(mine), CausalAttend()(0, *qkv, spec))


@pytest.mark.parametrize(
    "extra", [{}, {"window": 7}, {"softcap": 5.0}, {"sinks": torch.randn(HEADS)}]
)
def test_drafts_are_verified_beside_a_long_prompt(extra: dict[str, Any]) -> None:
    spec, long = AttentionSpec(SIZE**-0.5, **extra), SHORT + 5
    lengths, rows = (30, long, 9), (3, 0, 1)  # row 2 is not in use
    whole = [random_qkv(length, seed) for seed, length in enumerate(lengths)]
    cache = KVCache(5, long)
    past = (26, 0, 2)
    for row, start, qkv in zip(rows, past, whole, strict=True):
        if start:
            CachedAttend(cache, [Span(row, 0, start)])(0, *(x[:start] for x in qkv), spec)
    spans = [Span(row, a, b - a) for row, a, b in zip(rows, past, lengths, strict=True)]
    pending = [[x[a:] for x in qkv] for a, qkv in zip(past, whole, strict=True)]
    out = CachedAttend(cache, spans)(0, *map(torch.cat, zip(*pending, strict=True)), spec)
    wanted = [CausalAttend()(0, *qkv, spec)[a:] for a, qkv in zip(past, whole, strict=True)]
    torch.testing.assert_close(out, torch.cat(wanted))


def test_rejected_tokens_are_never_read() -> None:
    spec, cache = AttentionSpec(SIZE**-0.5), KVCache(1, 16)
    q, k, v = random_qkv(8, 0)
    wrong = random_qkv(6, 7)
    CachedAttend(cache, [Span(0, 0, 4)])(0, q[:4], k[:4], v[:4], spec)
    CachedAttend(cache, [Span(0, 4, 6)])(0, *wrong, spec)  # drafts, none kept
    after = CachedAttend(cache, [Span(0, 4, 4)])(0, q[4:], k[4:], v[4:], spec)
    torch.testing.assert_close(after, CausalAttend()(0, q, k, v, spec)[4:])


def test_layers_may_differ_in_shape() -> None:
    cache = KVCache(1, 4)
    for layer, (heads, size) in enumerate([(2, 8), (1, 16)]):
        k = torch.randn(3, heads, size)
        keys, values = cache.write(layer, Span(0, 0, 3), k, -k)
        assert torch.equal(keys, k) and torch.equal(values, -k)


def test_keys_and_values_may_differ_in_size() -> None:
    cache = KVCache(2, 4)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    keys, values = cache.write(0, Span(1, 0, 3), k, v)
    assert torch.equal(keys, k) and torch.equal(values, v)


def test_capacity_is_asserted() -> None:
    k = torch.zeros(3, 1, 2)
    with pytest.raises(AssertionError, match="only what fits"):
        KVCache(1, 4).write(0, Span(0, 2, 3), k, k)


def test_positions() -> None:
    spans = [Span(0, 5, 2), Span(1, 0, 3), Span(2, 9, 1)]
    assert positions(spans, torch.device("cpu")).tolist() == [5, 6, 0, 1, 2, 9]
