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
    causal_mask,
    tiled_attention,
    tiled_mask,
)


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

    def write(self, layer: int, span: Span, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (length, M, H) of a span; returns keys and values to its last block's end."""
        if layer not in self._layers:
            shape = (self.rows, self.capacity, *k.shape[1:])
            self._layers[layer] = k.new_zeros(shape), v.new_zeros(shape[:2] + v.shape[1:])
        row, start, length = span
        assert start + length <= self.capacity, "the scheduler admits only what fits"
        keys, values = self._layers[layer]
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        lengths = [span.length for span in self.spans]
        outputs = []
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        for index, (q_part, k_part, v_part) in enumerate(parts):
            span = self.spans[index]
            keys, values = self.cache.write(layer, span, k_part, v_part)
            if (spec.window, index) not in self._masks:
                self._masks[spec.window, index] = self._mask(span, spec.window, q.device)
            outputs.append(
                self._attention(q_part, keys, values, self._masks[spec.window, index], spec)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mask(self, span: Span, window: int | None, device: torch.device) -> Tensor | None:
        mask = causal_mask(span.start, span.length, window, device)
        if self.tiled:
            return tiled_mask(mask, span.length, span.start + span.length, device)
        return mask


def positions(spans: list[Span], device: torch.device) -> Tensor:
    """Positions (T,) of the packed tokens."""
    parts = [torch.arange(span.start, span.start + span.length, device=device) for span in spans]
    return torch.cat(parts)
