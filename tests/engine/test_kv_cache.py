"""Packed attention over cached rows equals attention over each request's whole sequence."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.engine import kv_cache
from peagle.engine.kv_cache import (
    SHORT,
    WASTE,
    CachedAttend,
    KVCache,
    Span,
    positions,
    together,
)
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
        spans = [Span([row], lo, hi - lo) for row, (lo, hi) in zip((2, 0), step, strict=True)]
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
            CachedAttend(cache, [Span([row], 0, start)])(0, *(x[:start] for x in qkv), spec)
    spans = [Span([row], a, b - a) for row, a, b in zip(rows, past, lengths, strict=True)]
    pending = [[x[a:] for x in qkv] for a, qkv in zip(past, whole, strict=True)]
    out = CachedAttend(cache, spans)(0, *map(torch.cat, zip(*pending, strict=True)), spec)
    wanted = [CausalAttend()(0, *qkv, spec)[a:] for a, qkv in zip(past, whole, strict=True)]
    torch.testing.assert_close(out, torch.cat(wanted))


def test_rejected_tokens_are_never_read() -> None:
    spec, cache = AttentionSpec(SIZE**-0.5), KVCache(1, 16)
    q, k, v = random_qkv(8, 0)
    wrong = random_qkv(6, 7)
    CachedAttend(cache, [Span([0], 0, 4)])(0, q[:4], k[:4], v[:4], spec)
    CachedAttend(cache, [Span([0], 4, 6)])(0, *wrong, spec)  # drafts, none kept
    after = CachedAttend(cache, [Span([0], 4, 4)])(0, q[4:], k[4:], v[4:], spec)
    torch.testing.assert_close(after, CausalAttend()(0, q, k, v, spec)[4:])


@pytest.mark.parametrize("blocks", [[0, 1, 2, 3], [6, 2, 7, 0], [3, 4, 5, 1]])
@pytest.mark.parametrize("window", [None, 5])
def test_blocks_may_lie_anywhere(blocks: list[int], window: int | None) -> None:
    """Written over several rounds, alone and beside another request whose blocks lie between."""
    spec, cache = AttentionSpec(SIZE**-0.5, window), KVCache(12, 4)
    one, two = random_qkv(15, 0), random_qkv(13, 1)
    other = [block for block in range(12) if block not in blocks][:4]
    outputs: list[list[Tensor]] = [[], []]
    for start, end in ((0, 7), (7, 8), (8, 13)):
        spans = [Span(own, start, end - start) for own in (blocks, other)]
        packed = [torch.cat([a[start:end], b[start:end]]) for a, b in zip(one, two, strict=True)]
        parts = CachedAttend(cache, spans)(0, *packed, spec).chunk(2)
        for mine, part in zip(outputs, parts, strict=True):
            mine.append(part)
    last = CachedAttend(cache, [Span(blocks, 13, 2)])(0, *(x[13:] for x in one), spec)
    whole = torch.cat([*outputs[0], last])
    torch.testing.assert_close(whole, CausalAttend()(0, *one, spec))
    torch.testing.assert_close(torch.cat(outputs[1]), CausalAttend()(0, *two, spec))


def test_one_very_long_request_does_not_make_all_read_as_much() -> None:
    spec, cache = AttentionSpec(SIZE**-0.5), KVCache(40, 4)
    long, short = random_qkv(100, 0), [random_qkv(6, seed) for seed in (1, 2, 3)]
    rows = [range(25), range(25, 27), range(27, 29), range(29, 31)]
    CachedAttend(cache, [Span(rows[0], 0, 98)])(0, *(x[:98] for x in long), spec)
    spans = [Span(rows[0], 98, 2), *(Span(own, 0, 6) for own in rows[1:])]
    packed = [torch.cat([a[98:], *rest]) for a, *rest in zip(long, *short, strict=True)]
    wanted = [CausalAttend()(0, *long, spec)[98:], *(CausalAttend()(0, *x, spec) for x in short)]
    found = CachedAttend(cache, spans)(0, *packed, spec)
    torch.testing.assert_close(found, torch.cat(wanted))


def test_layers_may_differ_in_shape() -> None:
    cache = KVCache(2, 4)
    for layer, (heads, size, wide) in enumerate([(2, 8, 8), (1, 16, 4)]):
        k, v = torch.randn(3, heads, size), torch.randn(3, heads, wide)
        CachedAttend(cache, [Span([1], 0, 3)])(layer, k, k, v, AttentionSpec(1.0))
        keys, values = cache.layer(layer, k, v)
        assert torch.equal(keys[1, :3], k) and torch.equal(values[1, :3], v)


def test_what_was_not_a_number_is_not_seen_behind_a_mask() -> None:
    """A failed request's blocks are wiped: zero times NaN would be NaN in other requests' rows."""
    spec, cache = AttentionSpec(SIZE**-0.5), KVCache(4, 4)
    bad = [torch.full_like(x, float("nan")) for x in random_qkv(4, 0)]
    CachedAttend(cache, [Span([0], 0, 4)])(0, *bad, spec)
    cache.wipe([0])
    pair = [random_qkv(3, 1), random_qkv(2, 2)]
    spans = [Span([0], 0, 3), Span([1], 0, 2)]
    packed = [torch.cat(both) for both in zip(*pair, strict=True)]
    assert CachedAttend(cache, spans)(0, *packed, spec).isfinite().all()


def test_capacity_is_asserted() -> None:
    with pytest.raises(AssertionError, match="blocks enough"):
        CachedAttend(KVCache(1, 4), [Span([0], 2, 3)])


def test_positions() -> None:
    spans = [Span([0], 5, 2), Span([1], 0, 3), Span([2], 9, 1)]
    assert positions(spans, torch.device("cpu")).tolist() == [5, 6, 0, 1, 2, 9]


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 2 * SHORT)), max_size=40),
    st.integers(1, 20_000),
)
def test_spans_attended_together_are_alike_and_not_too_many(
    lengths: list[tuple[int, int]], most: int
) -> None:
    spans = [Span([], start, length) for start, length in lengths]
    groups = together(spans, most)
    members = [index for group in groups for index in group]
    assert len(set(members)) == len(members)
    assert all(spans[index].length <= SHORT for index in members)
    for group in groups:
        longest = max(spans[index].end for index in group)
        assert len(group) > 1 and len(group) * longest <= most
        assert all(longest <= WASTE * spans[index].end for index in group)


def test_spans_of_one_length_are_attended_together_as_far_as_they_fit() -> None:
    assert together([Span([], 9, 1)] * 5, 20) == [[0, 1], [2, 3]]
    assert together([Span([], 9, 1)] * 5, 50) == [[0, 1, 2, 3, 4]]
    assert together([Span([], 9, SHORT + 1)] * 5, 5000) == []


def test_many_drafts_of_all_lengths_equal_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several groups, and some alone: more keys than are read together."""
    monkeypatch.setattr(kv_cache, "CACHED", 300 * 2 * KV_HEADS * SIZE * 4)  # 300 keys
    spec, lengths = AttentionSpec(SIZE**-0.5), [100, 93, 86, 79, 40, 30, 3]
    whole = [random_qkv(length, seed) for seed, length in enumerate(lengths)]
    cache = KVCache(7, max(lengths))
    for row, qkv in enumerate(whole):
        CachedAttend(cache, [Span([row], 0, len(qkv[0]) - 2)])(0, *(x[:-2] for x in qkv), spec)
    spans = [Span([row], length - 2, 2) for row, length in enumerate(lengths)]
    pending = (torch.cat([qkv[i][-2:] for qkv in whole]) for i in range(3))
    attend = CachedAttend(cache, spans)
    out = attend(0, *pending, spec)
    assert [short.members for short in attend._short] == [[0, 1, 2], [4, 5]]
    wanted = [CausalAttend()(0, *qkv, spec)[-2:] for qkv in whole]
    torch.testing.assert_close(out, torch.cat(wanted))
