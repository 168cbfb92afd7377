"""Keys and values of running requests, in blocks that the scheduler hands out.

Shapes: T packed tokens, N query heads, M key/value heads, H head size, B spans, S keys.
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.model import native
from peagle.model.attend import (
    KEY_BLOCK,
    ROW_TILE,
    AttentionSpec,
    attention,
    batched_attention,
    causal_mask,
    tiled_attention,
    tiled_mask,
)

SHORT = 32  # tokens of a span that is attended together with others
GPU_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# Of the spans that torch attends together:
WASTE = 1.5  # keys read for one of them, over keys needed, at most
CACHED = 4 << 20  # bytes of keys and values read together on a CPU: more leave its caches


class Span(NamedTuple):
    """Tokens of one request in a packed forward: they stand at start … start + length − 1."""

    blocks: Sequence[int]  # of the request, from its first token on
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class KVCache:
    """One model's keys and values: per layer (blocks + 1, size, M, H), allocated at a layer's first
    write, because layers may differ in shape (Gemma-4). Rejected tokens are overwritten, never
    seen."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.graphs: Any = None  # forwards that were recorded over it (engine/forward.py)

    def layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, shaped as k, v (length, M, H) want them."""
        if layer not in self._layers:
            shape = self.blocks + 1, self.size  # the last is for rows of padding
            self._layers[layer] = tuple(zeros((*shape, *x.shape[1:]), x) for x in (k, v))  # type: ignore[assignment]
        return self._layers[layer]

    def wipe(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN: what a mask hides is still multiplied, by zero."""
        for keys, values in self._layers.values():
            keys[blocks] = 0
            values[blocks] = 0


class CachedAttend:
    """Attend for one packed forward: each span sees its own request's past and itself, causally.
    `tiled`: in the fixed tiles of the deterministic mode."""

    def __init__(self, cache: KVCache, spans: list[Span], *, tiled: bool = False) -> None:
        for span in spans:
            assert span.end <= len(span.blocks) * cache.size, "the scheduler gives blocks enough"
        self.cache, self.spans, self.tiled = cache, spans, tiled
        self._masks: dict[tuple[int | None, int, int], Tensor | None] = {}
        self._parts = parts(spans)
        self._long = [index for index, span in enumerate(spans) if span.length > SHORT]
        self._slots: slice | Tensor | None = None
        self._native: native.Spans | None = None
        self._tables: dict[tuple[int, int], Any] = {}  # by rows of a program, and heads a key
        self._places: Tensor | None = None
        self._short: list[ShortSpans] = []
        self._lonely: Sequence[int] = range(len(spans))  # spans in none of these
        self._reads: list[slice | Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.cache.layer(layer, k, v)
        if self._slots is None:
            self._slots = places(self.spans, self.cache.size, q.device)
        for kept, new in ((keys, k), (values, v)):
            if isinstance(self._slots, slice):
                kept.flatten(0, 1)[self._slots].copy_(new)
            else:
                kept.flatten(0, 1).index_copy_(0, self._slots, new)
        q = q.contiguous()
        if kernels(q.device.type) and q.dtype in GPU_DTYPES:
            return self._on_gpu(q, keys, values, spec)
        attend = self._natively if self._usable(q, keys, values) else self._by_torch
        return attend(q, keys, values, spec)

    def _usable(self, *tensors: Tensor) -> bool:
        return self.cache.size % native.LANES == 0 and native.usable(*tensors)

    def _on_gpu(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """All spans in one call; in the deterministic mode every row in the same way."""
        gpu, groups = kernels(q.device.type), q.shape[1] // keys.shape[2]
        key = gpu.rows_for(self._tokens(), q, keys, values), groups
        if key not in self._tables:
            self._tables[key] = self._table(*key, q.device)
        return gpu.attend(q, keys, values, self._tables[key], spec, 1 if self.tiled else None)

    def _tokens(self) -> int:
        """Tokens of a span that a program takes, at most."""
        return ROW_TILE if self.tiled else max(span.length for span in self.spans)

    def _table(self, rows: int, groups: int, device: torch.device) -> Any:
        """For programs of so many rows, and so many of them a token."""
        table = kernels(device.type).Table
        return table.of(self.packed(), self.cache.size, rows, groups, device)

    def packed(self) -> list[tuple[int, int, int, Sequence[int]]]:
        """Of each span its first packed token, that token's position, the number of tokens, and
        the span's blocks."""
        pairs = zip(self._parts, self.spans, strict=True)
        return [(part.start, span.start, span.length, span.blocks) for part, span in pairs]

    def paged(self, layers: Sequence[int], like: Tensor) -> native.Paged | None:
        """For layers that keep and attend by themselves, keys and values shaped as `like` (length,
        M, H); None when not all of it can be native."""
        if self._long or self.cache.size % native.LANES or not native.usable(like):
            return None
        if self._places is None:
            self._places = torch.tensor(place_list(self.spans, self.cache.size))
        caches = [self.cache.layer(layer, like, like) for layer in layers]
        return native.Paged(caches, self._places, self._short_spans())

    def _short_spans(self) -> native.Spans:
        if self._native is None:
            short = [span for span in self.packed() if span[2] <= SHORT]
            self._native = native.Spans(short, self.cache.size)
        return self._native

    def _natively(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Short spans in one call; the rows of a long prompt are enough for torch's kernel."""
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        native.attend(q, keys, values, out, self._short_spans(), spec)
        for index in self._long:
            part = self._parts[index]
            out[part] = self._alone(index, q[part], keys, values, spec)
        return out

    def _by_torch(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Short spans together, as far as they are alike; the others one by one."""
        if len(self.spans) == 1:
            return self._alone(0, q, keys, values, spec)
        if not self._short and not self.tiled:
            each = 2 * keys[0, 0].numel() * keys.element_size()
            most = CACHED // each if q.device.type == "cpu" else sys.maxsize
            groups, size = together(self.spans, most), self.cache.size
            self._short = [ShortSpans(self.spans, self._parts, g, size, q.device) for g in groups]
            self._lonely = sorted(set(self._lonely).difference(*groups))
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        plain = spec.softcap is None and spec.sinks is None
        for short in self._short if plain else ():
            out[short.tokens] = short.attend(keys, values, q, spec)
        for index in self._lonely if plain else range(len(self.spans)):
            part = self._parts[index]
            out[part] = self._alone(index, q[part], keys, values, spec)
        return out

    def _alone(
        self, index: int, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """One span's output (length, N, H)."""
        if not self._reads:
            self._reads = [_reader(span, self.cache.size, q.device) for span in self.spans]
        span, read = self.spans[index], self._reads[index]
        if isinstance(read, slice):
            seen = [x.flatten(0, 1)[read] for x in (keys, values)]
        else:
            seen = [x.index_select(0, read).flatten(0, 1)[: span.end] for x in (keys, values)]
        # The rows of a long prompt are enough for the kernel as they are.
        draft = span.length <= SHORT and spec.softcap is None and spec.sinks is None
        groups = q.shape[1] // keys.shape[2]
        if (spec.window, index, groups) not in self._masks:
            mask = causal_mask(span.start, span.length, spec.window, q.device)
            if self.tiled:
                mask = tiled_mask(mask, span.length, span.end, q.device)
            elif draft and mask is not None:
                mask = _bias(mask[None], q, groups)
            self._masks[spec.window, index, groups] = mask
        mask = self._masks[spec.window, index, groups]
        if self.tiled:
            whole = [F.pad(x, (0, 0, 0, 0, 0, -span.end % KEY_BLOCK)) for x in seen]
            return tiled_attention(q, whole[0], whole[1], mask, spec)
        if draft:
            return batched_attention(q[None], seen[0][None], seen[1][None], mask, spec.scale)[0]
        return attention(q, seen[0], seen[1], mask, spec)


@cache
def kernels(device: str) -> Any:
    """engine/paged_attention.py, where there is a GPU that its kernels are made for."""
    if device != "cuda" or not find_spec("triton"):
        return None
    return import_module("peagle.engine.paged_attention")


def together(spans: list[Span], most: int) -> list[list[int]]:
    """Groups of two and more short spans that are best attended in one call: about as long as each
    other, and of `most` keys at most, with what they are padded by."""
    short = [index for index, span in enumerate(spans) if span.length <= SHORT]
    groups, longest = list[list[int]](), 0
    for index in sorted(short, key=lambda index: spans[index].end, reverse=True):
        end = spans[index].end
        if groups and longest <= WASTE * end and (len(groups[-1]) + 1) * longest <= most:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = end
    return [sorted(group) for group in groups if len(group) > 1]


class ShortSpans:
    """Spans of at most SHORT tokens, attended in one call: queries are padded to the longest, keys
    to the most. One call a span costs more than its attention."""

    def __init__(
        self,
        spans: list[Span],
        parts: list[slice],
        members: list[int],
        size: int,
        device: torch.device,
    ) -> None:
        tokens, rows, columns, at = list[int](), list[int](), list[int](), list[int]()
        self.members = members
        blocks = -(-max(spans[index].end for index in members) // size)
        table = torch.zeros(len(members), blocks, dtype=torch.int64)
        for row, index in enumerate(members):
            blocks_of, start, length = spans[index]
            own = blocks_of[:blocks]
            table[row, : len(own)] = torch.tensor(own)
            tokens += range(parts[index].start, parts[index].stop)
            rows += [row] * length
            columns += range(length)
            at += range(start, start + length)
        stands = torch.zeros(len(members), max(columns) + 1, dtype=torch.int64)
        stands[rows, columns] = torch.tensor(at)
        self.tokens, self._table = torch.tensor(tokens).to(device), table.to(device)
        self._own = torch.tensor(rows).to(device), torch.tensor(columns).to(device)
        # Where each query stands; those of padding see the first key, for a softmax needs one.
        self._stands, self._end = stands.to(device), max(at) + 1
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Output (len(tokens), N, H) of the short spans' tokens over keys and values (blocks, size,
        M, H) of the cache."""
        key = spec.window, q.shape[1] // keys.shape[2]
        if key not in self._masks:
            self._masks[key] = self._mask(*key, q)
        queries = q.new_zeros(*self._stands.shape, *q.shape[1:])
        queries[self._own] = q[self.tokens]
        # Whole blocks are copied; an index would go through them element by element.
        taken = [x.index_select(0, self._table.flatten()) for x in (keys, values)]
        seen = [x.unflatten(0, self._table.shape).flatten(1, 2)[:, : self._end] for x in taken]
        mask = self._masks[key]
        return batched_attention(queries, seen[0], seen[1], mask, spec.scale)[self._own]

    def _mask(self, window: int | None, groups: int, like: Tensor) -> Tensor:
        """What is added to the scores (B, 1, G·T, S)."""
        behind = self._stands[..., None] - torch.arange(self._end, device=like.device)
        visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        return _bias(visible, like, groups)


def _bias(visible: Tensor, like: Tensor, groups: int) -> Tensor:
    """A mask (B, T, S) as what is added to the scores of G query heads (B, 1, G·T, S): torch makes
    this of it in every call, and so in every layer."""
    zeros = torch.zeros(visible.shape, device=visible.device)
    bias = zeros.masked_fill(~visible, float("-inf")).to(like)
    return bias[:, None].repeat(1, 1, groups, 1)


def parts(spans: list[Span]) -> list[slice]:
    """Each span's packed tokens."""
    ends = accumulate((span.length for span in spans), initial=0)
    return [slice(*pair) for pair in pairwise(ends)]


def positions(spans: list[Span], device: torch.device) -> Tensor:
    """Positions (T,) of the packed tokens."""
    at = [position for span in spans for position in range(span.start, span.end)]
    return torch.tensor(at, device=device)


def place_list(spans: list[Span], size: int) -> list[int]:
    """Where in the cache each packed token is kept (T)."""
    return [
        span.blocks[position // size] * size + position % size
        for span in spans
        for position in range(span.start, span.end)
    ]


def places(spans: list[Span], size: int, device: torch.device) -> slice | Tensor:
    """Where in the cache each packed token is kept (T,); a slice when they lie in a row."""
    at = place_list(spans, size)
    row = range(at[0], at[0] + len(at))
    return slice(row.start, row.stop) if at == list(row) else torch.tensor(at).to(device)


def _reader(span: Span, size: int, device: torch.device) -> slice | Tensor:
    """Where the span's keys and values are: the slots, when its blocks lie in a row, for they are
    read without a copy; else the blocks."""
    blocks = span.blocks[: -(-span.end // size)]
    first = blocks[0]
    if list(blocks) == list(range(first, first + len(blocks))):
        return slice(first * size, first * size + span.end)
    return torch.tensor(blocks).to(device)


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on a CPU without touching memory, so that a large cache costs what is used of it."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    pages = np.zeros(int(np.prod(shape)) * like.element_size(), np.uint8)
    return torch.from_numpy(pages).view(like.dtype).view(shape)
