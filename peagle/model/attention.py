"""Attention as an argument: every model here calls `attend(layer, q, k, v, spec)`.

Shapes: T query tokens, S key tokens, N query heads, M key/value heads, H head size.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 256  # rows of a document that attend together
SINK_WIDTH = 8  # dimensions added for a sink: kernels want head sizes of whole eights


class AttentionSpec(NamedTuple):
    """Parameters of one layer's attention; the mask is apart."""

    scale: float
    window: int | None = None  # a query sees this many positions, itself included
    softcap: float | None = None  # tanh cap on attention logits (Gemma-2)
    sinks: Tensor | None = None  # (N,) one logit a head that takes probability, no value (GPT-OSS)


class HeadShape(NamedTuple):
    """Shape of a layer's keys (heads, key_size) and values (heads, value_size) for one token."""

    heads: int
    key_size: int
    value_size: int


class Attend(Protocol):
    """Attention in a layer. It decides which keys a token sees, those of earlier forwards too."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q (T, N, H), k (T, M, H) and v (T, M, HV) of the tokens in this forward → (T, N, HV)."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Attention of q (T, N, H) over k, v (S, M, H) under a bool mask (T, S), None = all visible.
    Values, and then the output, may have another head size than keys (DeepSeek).

    Query heads are grouped by the key/value head they share, so keys are never copied per head.
    """
    groups = q.shape[1] // k.shape[1]
    q = q.transpose(0, 1).unflatten(0, (-1, groups))  # (M, G, T, H)
    # (M, G, S, H), stride 0 over G
    k, v = (x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (k, v))
    size = v.shape[-1]
    if spec.softcap is not None:
        out = _capped(q, k, v, mask, spec)
    else:
        if spec.sinks is not None:
            q, k, v, mask = _with_sink(q, k, v, mask, spec.sinks / spec.scale)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
    return out[..., :size].permute(2, 0, 1, 3).flatten(1, 2)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    assert spec.softcap is not None and spec.sinks is None
    scores = torch.tanh(q @ k.transpose(-1, -2) * (spec.scale / spec.softcap)) * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """A sink is one more key, whose value is zero and whose score is the sink's logit: one more
    dimension has this logit in every query, and 1 in that key alone. So all heads share a mask."""
    sink = F.pad(logits.to(q.dtype)[:, None], (0, SINK_WIDTH - 1)).view(*q.shape[:2], 1, -1)
    q = torch.cat([q, sink.expand(-1, -1, q.shape[2], -1)], dim=-1)
    width = k.shape[-1]
    k = F.pad(k, (0, SINK_WIDTH, 0, 1))
    k[..., -1, width] = 1
    v = F.pad(v, (0, k.shape[-1] - v.shape[-1], 0, 1))
    return q, k, v, None if mask is None else F.pad(mask, (0, 1), value=True)


def causal_mask(start: int, tokens: int, window: int | None, device: torch.device) -> Tensor | None:
    """Bool (tokens, start + tokens): query i is at position start + i. None when all is visible."""
    if tokens == 1 and (window is None or start < window):
        return None
    queries = torch.arange(start, start + tokens, device=device)[:, None]
    keys = torch.arange(start + tokens, device=device)[None]
    visible = keys <= queries
    return visible if window is None else visible & (queries - keys < window)


class CausalAttend:
    """One document from its first token, no cache: training's and the tests' view of the target. A
    block of rows at a time attends to the keys that its rows see, so memory is linear in length."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        outputs = list[Tensor]()
        for start, rows in zip(range(0, len(q), QUERY_BLOCK), q.split(QUERY_BLOCK), strict=True):
            first = 0 if spec.window is None else max(0, start + 1 - spec.window)
            seen = slice(first, start + len(rows))
            mask = causal_mask(start - first, len(rows), spec.window, q.device)
            outputs.append(attention(rows, k[seen], v[seen], mask, spec))
        return torch.cat(outputs)
