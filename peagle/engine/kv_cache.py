"""Keys and values of running requests, a row of contiguous slots each.

Shapes: T packed tokens, N query heads, M key/value heads, H head size, C capacity in tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.model.attend import (
    KEY_BLOCK,
    AttentionSpec,
    attention,
    batched_attention,
    causal_mask,
    tiled_attention,
    tiled_mask,
)

SHORT = 32  # tokens of a span that is attended together with others


class Span(NamedTuple):
    """Tokens of one request in a packed forward: they stand at start … start + length − 1."""

    row: int
    start: int
    length: int


class KVCache:
    """One model's keys and values: per layer (rows, C, M, H), allocated at a layer's first write,
    because layers may differ in shape (Gemma-4). Rejected tokens are overwritten, never seen.

    `block` > 1 hands keys out in whole blocks, whatever is behind the last one being hidden by a
    mask: the deterministic mode's attention wants them so, and nothing is copied.
    """

    def __init__(self, rows: int, capacity: int, block: int = 1) -> None:
        self.rows, self.block = rows, block
        self.capacity = capacity + -capacity % block
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values (rows, C, M, H), shaped as k, v (length, M, H) want them."""
        if layer not in self._layers:
            shape = (self.rows, self.capacity, *k.shape[1:])
            self._layers[layer] = k.new_zeros(shape), v.new_zeros(shape[:2] + v.shape[1:])
        return self._layers[layer]

    def write(self, layer: int, span: Span, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (length, M, H) of a span; returns keys and values to its last block's end."""
        row, start, length = span
        assert start + length <= self.capacity, "the scheduler admits only what fits"
        keys, values = self.layer(layer, k, v)
        keys[row, start : start + length] = k
        values[row, start : start + length] = v
        end = start + length
        end += -end % self.block
        return keys[row, :end], values[row, :end]


class CachedAttend:
    """Attend for one packed forward: each span sees its own request's past and itself, causally;
    in fixed tiles when the cache has blocks."""

    def __init__(self, cache: KVCache, spans: list[Span]) -> None:
        assert cache.block in (1, KEY_BLOCK)
        self.cache, self.spans, self.tiled = cache, spans, cache.block > 1
        self._attention = tiled_attention if self.tiled else attention
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}
        drafts = [span for span in spans if span.length <= SHORT]
        self._short = ShortSpans(spans) if len(drafts) > 1 and not self.tiled else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        short = self._short if spec.softcap is None and spec.sinks is None else None
        if short is not None:
            out[short.tokens] = short.attend(*self.cache.layer(layer, k, v), q, k, v, spec)
        begin = 0
        for index, span in enumerate(self.spans):
            part = slice(begin, begin := begin + span.length)
            if short is not None and span.length <= SHORT:
                continue
            keys, values = self.cache.write(layer, span, k[part], v[part])
            if (spec.window, index) not in self._masks:
                self._masks[spec.window, index] = self._mask(span, spec.window, q.device)
            mask = self._masks[spec.window, index]
            out[part] = self._attention(q[part], keys, values, mask, spec)
        return out

    def _mask(self, span: Span, window: int | None, device: torch.device) -> Tensor | None:
        mask = causal_mask(span.start, span.length, window, device)
        if self.tiled:
            return tiled_mask(mask, span.length, span.start + span.length, device)
        return mask


class ShortSpans:
    """The spans of at most SHORT tokens, attended in one call: queries are padded to the longest,
    keys are read where they lie. One call a span costs more than its attention."""

    def __init__(self, spans: list[Span]) -> None:
        tokens, rows, columns, at = list[int](), list[int](), list[int](), list[int]()
        begin = 0
        for row, start, length in spans:
            if length <= SHORT:
                tokens += range(begin, begin + length)
                rows += [row] * length
                columns += range(length)
                at += range(start, start + length)
            begin += length
        self.tokens, self._column = torch.tensor(tokens), torch.tensor(columns)
        self._row, self._at = torch.tensor(rows), torch.tensor(at)
        self._low, self._end = min(rows), max(at) + 1
        shape = max(rows) + 1 - self._low, max(columns) + 1
        # Where each query stands; those of padding see the first key, for a softmax needs one.
        self._stands = torch.zeros(shape, dtype=torch.int64)
        self._stands[self._row - self._low, self._column] = self._at
        self._masks: dict[int | None, Tensor] = {}

    def attend(  # noqa: PLR0913 (a layer's cache, and what attend is given)
        self,
        keys: Tensor,  # (rows, C, M, H) of the cache
        values: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """Output (len(tokens), N, H) of the short spans' tokens, after storing their k and v."""
        keys[self._row, self._at] = k[self.tokens]
        values[self._row, self._at] = v[self.tokens]
        if spec.window not in self._masks:
            self._masks[spec.window] = self._mask(spec.window, q)
        own = self._row - self._low, self._column
        queries = q.new_zeros(*self._stands.shape, *q.shape[1:])
        queries[own] = q[self.tokens]
        rows = slice(self._low, self._low + len(queries))
        seen = keys[rows, : self._end], values[rows, : self._end]
        return batched_attention(queries, *seen, self._masks[spec.window], spec.scale)[own]

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """What is added to the scores (B, T, S): as such it is made once, not once a layer."""
        behind = self._stands[..., None] - torch.arange(self._end)
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")).to(like)


def positions(spans: list[Span], device: torch.device) -> Tensor:
    """Positions (T,) of the packed tokens."""
    parts = [torch.arange(span.start, span.start + span.length, device=device) for span in spans]
    return torch.cat(parts)
