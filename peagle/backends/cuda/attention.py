"""Attention over the paged cache on a GPU, in one Triton kernel for drafts, prompts and decoding.
Keys and values are read where they lie in the cache. Triton comes with torch for CUDA.

Shapes: T rows, N query heads, M key/value heads, G = N / M, H and HV head sizes of keys and of
values, S splits.

A program takes some tokens of one request (tokens × the G query heads that share keys make its
rows), one key/value head, and one of S splits of the keys. Splitting keeps a whole GPU busy when
few requests have long contexts; a second kernel adds the splits up (flash decoding). Softmax is to
the base 2, in float32.

Keys are read in steps of STEP logical positions. The rows of a draft tree share the steps that end
at its root or before. The later steps are taken for one row after another, since each row has keys
of its own there. So a row of a tree adds up the same keys in the same steps as in plain decoding.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.backends.batch import BLOCK
from peagle.backends.cuda.device_batch import DeviceBatch
from peagle.backends.kv_cache import KVCache
from peagle.model.attention import AttentionSpec

LOG2E = tl.constexpr(1.4426950408889634)
MIN_TOKENS = 8  # tokens of a request that a program takes, at least; of exact attention, always
MIN_ROWS = 16  # rows of a program: a side of a tensor core's tile
MAX_ROWS = 128
MAX_QUERY_BYTES = 32768  # of a program: keys and values must fit into shared memory, too
MAX_KEY_BYTES = 16384  # of the keys that a program reads at a time
MAX_KEYS = 64  # that a program reads at a time
PROGRAMS_PER_MULTIPROCESSOR = 2  # wanted, by splitting keys
MAX_SPLITS = 32


class Launch(NamedTuple):
    """The division of the kernel's work."""

    rows: int  # of a program, a power of two
    splits: int  # of the keys, a power of two
    trees: bool  # rows may have tails


class CudaAttend:
    """The attend of one batch over a cache.

    `longest` is the number of keys that a request may see. In exact mode a row's result depends on
    its own query and keys alone: programs have a fixed number of rows, keys are not split, and the
    code is the same with and without trees.
    """

    def __init__(self, batch: DeviceBatch, cache: KVCache, longest: int, *, exact: bool) -> None:
        self.batch = batch
        self.cache = cache
        self.longest = longest
        self.exact = exact

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.cache.write(layer, self.batch.slots, k, v)
        launch = self.launch(q, keys, values)
        return paged_attention(q.contiguous(), keys, values, self.batch, spec, launch)

    def launch(self, q: Tensor, keys: Tensor, values: Tensor) -> Launch:
        """The division of the work for queries (T, N, H) over a layer's keys and values."""
        if self.exact:
            return Launch(program_rows(MIN_TOKENS, q, keys, values), 1, trees=True)
        batch, kv_heads = self.batch, keys.shape[2]
        mean = batch.rows // batch.requests
        rows = program_rows(max(MIN_TOKENS, mean), q, keys, values)
        tokens = rows // (q.shape[1] // kv_heads)
        programs = max(batch.requests, batch.rows // tokens) * kv_heads
        steps = -(-self.longest // _step(keys, values))
        return Launch(rows, _splits(programs, steps, q.device), batch.trees)


def program_rows(tokens: int, q: Tensor, keys: Tensor, values: Tensor) -> int:
    """Rows of a program that should take `tokens` tokens, as far as its memory allows."""
    groups = q.shape[1] // keys.shape[2]
    widest = _power_of_two(max(q.shape[2], values.shape[3]))
    max_rows = min(MAX_ROWS, MAX_QUERY_BYTES // (widest * q.element_size()))
    return max(min(max_rows, _power_of_two(tokens * groups)), _power_of_two(groups))


def paged_attention(  # noqa: PLR0913
    q: Tensor,  # (T, N, H), contiguous
    keys: Tensor,  # (blocks, BLOCK, M, H)
    values: Tensor,  # (blocks, BLOCK, M, HV)
    batch: DeviceBatch,
    spec: AttentionSpec,
    launch: Launch,
) -> Tensor:
    """Causal attention (T, N, HV) of a batch's rows over keys and values of a cache."""
    assert len(q) == batch.rows and keys.shape[:3] == values.shape[:3] and keys.shape[1] == BLOCK
    tokens, heads, _ = q.shape
    kv_heads, value_size = values.shape[2:]
    programs = tokens // (launch.rows // (heads // kv_heads)) + batch.requests
    out = q.new_empty(tokens, heads, value_size)
    sums = peaks = out  # not used without splits
    if launch.splits > 1:
        sums = q.new_empty(launch.splits, tokens, heads, value_size, dtype=torch.float32)
        peaks = q.new_empty(2, launch.splits, tokens, heads, dtype=torch.float32)
    sinks = q  # not used without sinks
    if spec.sinks is not None:
        sinks = spec.sinks
    _attend[(programs, kv_heads, launch.splits)](
        q, keys, values, out, sums, peaks, batch.positions, batch.query_starts, batch.seq_lens,
        batch.first_blocks, batch.longest_tail, batch.tables, sinks, spec.scale,
        spec.softcap or 0.0, spec.window or 0, tokens, batch.requests,
        **constants(q, keys, values, spec, launch),
    )  # fmt: skip
    if launch.splits > 1:
        _add_splits[(tokens, heads)](
            sums, peaks, out, tokens, heads, VALUE_SIZE=value_size,
            BLOCK_V=_power_of_two(value_size), SPLITS=launch.splits, num_warps=1,
        )  # fmt: skip
    return out


def constants(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, launch: Launch
) -> dict[str, int | bool]:
    """Constants of the compiled kernel; only shapes are read."""
    kv_heads, value_size = values.shape[2:]
    warps = 8
    if launch.rows < MAX_ROWS and q.element_size() == 2:
        warps = 4
    return {
        "KV_HEADS": kv_heads, "GROUPS": q.shape[1] // kv_heads, "KEY_SIZE": q.shape[2],
        "VALUE_SIZE": value_size, "BLOCK_H": _power_of_two(q.shape[2]),
        "BLOCK_V": _power_of_two(value_size), "BLOCK": BLOCK, "ROWS": launch.rows,
        "STEP": _step(keys, values), "SPLITS": launch.splits, "CAPPED": spec.softcap is not None,
        "WINDOWED": spec.window is not None, "SINKS": spec.sinks is not None, "TREES": launch.trees,
        "num_warps": warps, "num_stages": 2,
    }  # fmt: skip


def _step(keys: Tensor, values: Tensor) -> int:
    """Keys that a program reads at a time."""
    widest = _power_of_two(max(keys.shape[3], values.shape[3]))
    return min(MAX_KEYS, max(MIN_ROWS, MAX_KEY_BYTES // (widest * keys.element_size())))


def _power_of_two(count: int) -> int:
    """The power of two that is at least `count` and at least MIN_ROWS."""
    return max(MIN_ROWS, 1 << (count - 1).bit_length())


def _splits(programs: int, steps: int, device: torch.device) -> int:
    """A power of two: enough to fill the GPU, and at most one for each step of keys."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(device) // programs
    return 1 << max(0, min(wanted, steps, MAX_SPLITS).bit_length() - 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _find_request(query_starts, program, requests, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The request that a program works for. Those of request r begin at program
    query_starts[r] // TOKENS + r, so that each has enough, and some have one too many."""
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _find_slots(table, tail, place, known, longest, BLOCK: tl.constexpr, TREES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """Slots of the keys at some places, and whether there are any. The block table has the first
    `known`, a row's tail up to `longest` more."""
    there = place < known
    block = tl.load(table + place // BLOCK, mask=there, other=0)
    slot = block * BLOCK + place % BLOCK
    if TREES:
        in_tail = ~there & (place < known + longest)
        found = tl.load(tail + (place - known), mask=in_tail, other=-1)
        slot = tl.where(there, slot, found)
        there = slot >= 0
    return slot, there


# One compilation for all batches: sizes vary, and where the tables begin.
@triton.jit(
    do_not_specialize=[
        "positions", "query_starts", "seq_lens", "first_blocks", "longest_tail", "tables", "tokens",
        "requests",
    ]
)  # fmt: skip
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915, PLR0917
    q, keys, values, out, sums, peaks, positions, query_starts, seq_lens, first_blocks,
    longest_tail, tables, sinks, scale, softcap, window, tokens, requests,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, TREES: tl.constexpr,
) -> None:  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUPS  # noqa: N806
    program, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _find_request(query_starts, program, requests, TOKENS)
    first_row = tl.load(query_starts + request)
    length = (tl.load(query_starts + request + 1) - first_row).to(tl.int32)
    reached = tl.load(seq_lens + request).to(tl.int32)  # positions that the block table reaches
    table = tables + tl.load(first_blocks + request)
    tile = (program - request - first_row // TOKENS).to(tl.int32) * TOKENS
    if tile >= length:
        return

    row = tl.arange(0, ROWS)
    token = tile + row // GROUPS
    real = (row // GROUPS < TOKENS) & (token < length)
    position = tl.load(positions + first_row + token, mask=real, other=-1).to(tl.int32)
    at = (first_row + token) * (KV_HEADS * GROUPS) + head * GROUPS + row % GROUPS
    h, w = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    query = tl.load(
        q + at[:, None] * KEY_SIZE + h[None], mask=real[:, None] & (h < KEY_SIZE)[None], other=0.0
    )

    # Steps begin at the same keys in every tile, so that a row's sums do not depend on its tile.
    end = tl.max(position, 0) + 1
    begin = 0
    if WINDOWED:
        nearest = tl.min(tl.where(real, position, end), 0)
        begin = tl.maximum(nearest - window + 1, 0) // STEP * STEP
    known = tl.minimum(reached, end)  # keys whose slots the block table gives
    shared = end  # steps to here are taken for all rows together
    tail_keys = 0  # keys of the steps after them, which are taken for each row of a tree in turn
    longest = 0
    if TREES:
        longest = tl.load(longest_tail)
        shared = tl.where(known < end, tl.maximum(known // STEP * STEP, begin), end)
        tail_keys = tl.cdiv(end - shared, STEP) * STEP
    last = shared + tail_keys * tl.minimum(TOKENS, length - tile)
    share = tl.cdiv(tl.cdiv(last - begin, STEP), SPLITS) * STEP
    low = begin + split * share
    high = tl.minimum(low + share, last)

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # noqa: SIM102 (a key without a value; one is known when it is compiled)
        if split == 0:
            peak = tl.load(sinks + head * GROUPS + row % GROUPS).to(tl.float32) * LOG2E
            total += 1.0
    mixed = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for from_ in range(low, high, STEP):
        turn = tl.maximum(from_ - shared, 0) // tl.maximum(tail_keys, 1)  # token of the tile
        place = from_ - turn * tail_keys + tl.arange(0, STEP)
        tail = tables + (first_row + tile + turn) * longest
        slot, there = _find_slots(table, tail, place, known, longest, BLOCK, TREES)
        slot = slot * KV_HEADS + head
        key = tl.load(
            keys + slot[None] * KEY_SIZE + h[:, None],
            mask=there[None] & (h < KEY_SIZE)[:, None],
            other=0.0,
        )
        score = tl.dot(query, key, input_precision="ieee") * scale
        if CAPPED:  # tanh
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        seen = (place[None] <= position[:, None]) & there[None]
        if TREES:
            seen &= (from_ < shared) | (row // GROUPS == turn)[:, None]
        if WINDOWED:
            seen &= position[:, None] - place[None] < window
        score = tl.where(seen, score * LOG2E, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weight = tl.exp2(score - base[:, None])
        kept = tl.exp2(peak - base)
        value = tl.load(
            values + slot[:, None] * VALUE_SIZE + w[None],
            mask=there[:, None] & (w < VALUE_SIZE)[None],
            other=0.0,
        )
        mixed = mixed * kept[:, None]
        mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * kept + tl.sum(weight, 1)
        peak = higher

    total = tl.where(real, total, 1.0)
    shown = real[:, None] & (w < VALUE_SIZE)[None]
    if SPLITS == 1:
        tl.store(out + at[:, None] * VALUE_SIZE + w[None], mixed / total[:, None], mask=shown)
    else:
        rows = tl.full((), KV_HEADS * GROUPS, tl.int64) * tokens
        part = split * rows + at
        tl.store(sums + part[:, None] * VALUE_SIZE + w[None], mixed, mask=shown)
        tl.store(peaks + part, peak, mask=real)
        tl.store(peaks + SPLITS * rows + part, total, mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _add_splits(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    sums, peaks, out, tokens, heads,
    VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Adds up the splits of one row's head, each by how much of the softmax it holds."""
    rows = tl.full((), 1, tl.int64) * tokens * heads
    row = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    part = tl.arange(0, SPLITS) * rows + row
    peak, total = tl.load(peaks + part), tl.load(peaks + SPLITS * rows + part)
    weight = tl.exp2(peak - tl.max(peak, 0))
    w = tl.arange(0, BLOCK_V)
    each = tl.load(
        sums + part[:, None] * VALUE_SIZE + w[None], mask=(w < VALUE_SIZE)[None], other=0.0
    )
    mixed = tl.sum(each * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + row * VALUE_SIZE + w, mixed, mask=w < VALUE_SIZE)
