"""Attention over the paged cache on a GPU, in one Triton kernel: drafts to verify and prompts,
keys and values read where they lie. Triton comes with torch for CUDA.

Shapes: T packed tokens, N query heads, M key/value heads, G = N / M, H head size, S splits.

A program takes some rows of one span (tokens × the G query heads that share keys), one key/value
head, and one of S splits of the keys, so that few requests with long pasts keep a whole GPU busy;
where S > 1 a second kernel adds them up (flash decoding). Softmax is to the base 2, in float32.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.model.attend import AttentionSpec

LOG2E = tl.constexpr(1.4426950408889634)
LEAST, MOST = 16, 128  # rows of a program; a tensor core takes no fewer
ROOM = 32768  # bytes of them, at most: shared memory has to hold them beside keys and values
TILE = 16384  # bytes of keys that a program reads at a time, at most
KEYS = 64  # and their number
BUSY = 2  # programs for each multiprocessor, at least, by splitting keys
SPLITS = 32  # at most

# A span: its first packed token, that token's position, the number of tokens, and its blocks.
Packed = tuple[int, int, int, Sequence[int]]


class Table(NamedTuple):
    """Which queries of a packed forward see which blocks, on the device, each int32."""

    items: Tensor  # (I, 2): a span, and the first of its tokens that a program takes
    spans: Tensor  # (B, 4): first packed token, its position, number of tokens, first of `blocks`
    blocks: Tensor  # of all spans
    longest: int  # keys that some span sees
    rows: int  # of a program

    @classmethod
    def of(
        cls, spans: Sequence[Packed], size: int, rows: int, groups: int, device: torch.device
    ) -> "Table":
        """Of spans with blocks of `size` tokens, for programs of so many rows (`rows_for`), G of
        them a token."""
        lists = numbers(spans, size, rows // groups)
        # Brought over at once: each time is a call to the driver.
        whole = torch.tensor(sum(lists, []), dtype=torch.int32).to(device)
        items, table, blocks = whole.split([len(part) for part in lists])
        longest = max(start + length for _, start, length, _ in spans)
        return cls(items.view(-1, 2), table.view(-1, 4), blocks, longest, rows)


def numbers(
    spans: Sequence[Packed], size: int, tokens: int
) -> tuple[list[int], list[int], list[int]]:
    """A table's items, spans and blocks, for programs of so many tokens."""
    items, table, blocks = list[int](), list[int](), list[int]()
    for index, (token, start, length, own) in enumerate(spans):
        table += [token, start, length, len(blocks)]
        blocks += own[: -(-(start + length) // size)]
        for first in range(0, length, tokens):
            items += [index, first]
    return items, table, blocks


def rows_for(tokens: int, q: Tensor, keys: Tensor, values: Tensor) -> int:
    """Rows of a program, a power of two, where spans have at most so many tokens."""
    groups, widest = q.shape[1] // keys.shape[2], _power(max(q.shape[2], values.shape[3]))
    most = min(MOST, ROOM // (widest * q.element_size()))
    return max(min(most, _power(tokens * groups)), _power(groups))


def attend(  # noqa: PLR0913
    q: Tensor, keys: Tensor, values: Tensor, table: Table, spec: AttentionSpec, splits: int | None
) -> Tensor:
    """Causal attention (T, N, HV) of q (T, N, H) over keys (blocks, size, M, H) and values (blocks,
    size, M, HV). `splits` of the keys: None, as many as keep the GPU busy; with one, and programs
    of the same rows, a row's result depends on its own query and keys alone."""
    tokens, heads, _ = q.shape
    kv_heads, wide = values.shape[2:]
    if splits is None:
        steps = -(-table.longest // _step(keys, values))
        splits = _splits(len(table.items) * kv_heads, steps, q.device)
    out = q.new_empty(tokens, heads, wide)
    sums, peaks = out, out  # unused where nothing is split
    if splits > 1:
        sums = q.new_empty(splits, tokens, heads, wide, dtype=torch.float32)
        peaks = q.new_empty(2, splits, tokens, heads, dtype=torch.float32)
    _attend[(len(table.items), kv_heads, splits)](
        q, keys, values, out, sums, peaks, table.items, table.spans, table.blocks,
        spec.sinks if spec.sinks is not None else q, spec.scale, spec.softcap or 0.0,
        spec.window or 0, tokens, keys.shape[1],
        **constants(q, keys, values, spec, table.rows, splits),
    )  # fmt: skip
    if splits > 1:
        _add_up[(tokens, heads)](
            sums, peaks, out, tokens, heads, WIDE=wide, BLOCK_V=_power(wide), SPLITS=splits,
            num_warps=1,
        )  # fmt: skip
    return out


def constants(  # noqa: PLR0913
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, rows: int, splits: int
) -> dict[str, int | bool]:
    """What the kernel is compiled for; only shapes are read."""
    kv_heads, wide = values.shape[2:]
    return {
        "KV_HEADS": kv_heads, "GROUPS": q.shape[1] // kv_heads, "WIDTH": q.shape[2], "WIDE": wide,
        "BLOCK_H": _power(q.shape[2]), "BLOCK_V": _power(wide), "ROWS": rows,
        "STEP": _step(keys, values), "SPLITS": splits, "CAPPED": spec.softcap is not None,
        "WINDOWED": spec.window is not None, "SINKS": spec.sinks is not None,
        "num_warps": 4 if rows < MOST and q.element_size() == 2 else 8, "num_stages": 2,
    }  # fmt: skip


def _step(keys: Tensor, values: Tensor) -> int:
    """Keys that a program reads at a time."""
    widest = _power(max(keys.shape[3], values.shape[3]))
    return min(KEYS, max(LEAST, TILE // (widest * keys.element_size())))


def _power(count: int) -> int:
    """The power of two that is no less, and no less than a tensor core's side."""
    return max(LEAST, 1 << (count - 1).bit_length())


def _splits(programs: int, steps: int, device: torch.device) -> int:
    """A power of two: for a whole GPU, but no more than there are keys for."""
    wanted = BUSY * _multiprocessors(device) // programs
    return 1 << max(0, min(wanted, steps, SPLITS).bit_length() - 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915, PLR0917
    q, keys, values, out, sums, peaks, items, spans,
    blocks, sinks, scale, softcap, window, tokens, size,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span, tile = tl.load(items + item * 2), tl.load(items + item * 2 + 1)
    packed, start = tl.load(spans + span * 4), tl.load(spans + span * 4 + 1)
    length, first_block = tl.load(spans + span * 4 + 2), tl.load(spans + span * 4 + 3)

    row = tl.arange(0, ROWS)
    token = tile + row // GROUPS
    real = (row // GROUPS < ROWS // GROUPS) & (token < length)
    position = start + token
    at = (packed + token).to(tl.int64) * (KV_HEADS * GROUPS) + head * GROUPS + row % GROUPS
    h, w = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    query = tl.load(
        q + at[:, None] * WIDTH + h[None], mask=real[:, None] & (h < WIDTH)[None], other=0.0
    )

    # Whole steps from the first key on, so that a row sees them cut alike in every tile.
    end = start + tl.minimum(tile + ROWS // GROUPS, length)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(start + tile - window + 1, 0) // STEP * STEP
    share = tl.cdiv(tl.cdiv(end - begin, STEP), SPLITS) * STEP
    low = begin + split * share
    high = tl.minimum(low + share, end)

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # noqa: SIM102 (a key without a value; one is known when it is compiled)
        if split == 0:
            peak = tl.load(sinks + head * GROUPS + row % GROUPS).to(tl.float32) * LOG2E
            total += 1.0
    mixed = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for from_ in range(low, high, STEP):
        place = from_ + tl.arange(0, STEP)
        there = place < high
        block = tl.load(blocks + first_block + place // size, mask=there, other=0)
        slot = (block.to(tl.int64) * size + place % size) * KV_HEADS + head
        key = tl.load(
            keys + slot[None] * WIDTH + h[:, None],
            mask=there[None] & (h < WIDTH)[:, None],
            other=0.0,
        )
        score = tl.dot(query, key, input_precision="ieee") * scale
        if CAPPED:  # tanh
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        seen = (place[None] <= position[:, None]) & there[None]
        if WINDOWED:
            seen &= position[:, None] - place[None] < window
        score = tl.where(seen, score * LOG2E, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weight = tl.exp2(score - base[:, None])
        kept = tl.exp2(peak - base)
        value = tl.load(
            values + slot[:, None] * WIDE + w[None],
            mask=there[:, None] & (w < WIDE)[None],
            other=0.0,
        )
        mixed = mixed * kept[:, None]
        mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * kept + tl.sum(weight, 1)
        peak = higher

    total = tl.where(real, total, 1.0)
    shown = real[:, None] & (w < WIDE)[None]
    if SPLITS == 1:
        tl.store(out + at[:, None] * WIDE + w[None], mixed / total[:, None], mask=shown)
    else:
        rows = tl.full((), KV_HEADS * GROUPS, tl.int64) * tokens
        part = split * rows + at
        tl.store(sums + part[:, None] * WIDE + w[None], mixed, mask=shown)
        tl.store(peaks + part, peak, mask=real)
        tl.store(peaks + SPLITS * rows + part, total, mask=real)


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    sums, peaks, out, tokens, heads,
    WIDE: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """The splits of one token's head, each by how much of the softmax it holds."""
    rows = tl.full((), 1, tl.int64) * tokens * heads
    row = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    part = tl.arange(0, SPLITS) * rows + row
    peak, total = tl.load(peaks + part), tl.load(peaks + SPLITS * rows + part)
    weight = tl.exp2(peak - tl.max(peak, 0))
    w = tl.arange(0, BLOCK_V)
    each = tl.load(sums + part[:, None] * WIDE + w[None], mask=(w < WIDE)[None], other=0.0)
    mixed = tl.sum(each * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + row * WIDE + w, mixed, mask=w < WIDE)
