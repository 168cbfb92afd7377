"""Proposing K tokens a request: one drafter forward (P-EAGLE) or K of them (EAGLE-3).

Shapes: B requests, T packed slots, D drafter hidden, F·E target features.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.kv_cache import CachedAttend, KVCache, Span, positions
from peagle.model.drafter import Drafter, DrafterOutput


class NewSlots(NamedTuple):
    """Newly verified slots of one request; the last one predicts the next token."""

    row: int
    start: int
    ids: list[int]
    features: Tensor  # (len(ids), F·E)


@torch.no_grad()
def propose(drafter: Drafter, cache: KVCache, slots: list[NewSlots], k: int) -> list[list[int]]:
    """K draft tokens (target ids) for each of B requests."""
    assert k >= 1
    features = drafter.project(torch.cat([s.features for s in slots]))
    if drafter.config.method == "p-eagle":
        return _parallel(drafter, cache, slots, features, k)
    return _autoregressive(drafter, cache, slots, features, k)


def _parallel(
    drafter: Drafter, cache: KVCache, slots: list[NewSlots], features: Tensor, k: int
) -> list[list[int]]:
    """Real slots, then k − 1 placeholders, in one forward."""
    assert drafter.config.mask_token_id is not None
    ids, parts, spans, rows = list[int](), list[Tensor](), list[Span](), list[int]()
    filler = drafter.placeholders(torch.arange(1, k, device=features.device))
    for new, real in zip(slots, features.split([len(s.ids) for s in slots]), strict=True):
        ids += new.ids + [drafter.config.mask_token_id] * (k - 1)
        parts += [real, filler]
        spans.append(Span(new.row, new.start, len(new.ids) + k - 1))
        rows += range(len(ids) - k, len(ids))
    normed = _forward(drafter, cache, ids, torch.cat(parts), spans).normed
    return drafter.draft_tokens(normed[rows]).view(-1, k).tolist()


def _autoregressive(
    drafter: Drafter, cache: KVCache, slots: list[NewSlots], features: Tensor, k: int
) -> list[list[int]]:
    """Real slots give the first token; each further slot is fed the token and state before it."""
    spans = [Span(new.row, new.start, len(new.ids)) for new in slots]
    out = _forward(drafter, cache, [i for new in slots for i in new.ids], features, spans)
    last = torch.tensor([span.length for span in spans]).cumsum(0) - 1
    drafts = [drafter.draft_tokens(out.normed[last])]
    recurrent = out.recurrent[last]
    spans = [Span(span.row, span.start + span.length, 1) for span in spans]
    for _ in range(k - 1):
        out = _forward(drafter, cache, drafts[-1], recurrent, spans)
        drafts.append(drafter.draft_tokens(out.normed))
        recurrent = out.recurrent
        spans = [span._replace(start=span.start + 1) for span in spans]
    return torch.stack(drafts, dim=1).tolist()


def _forward(
    drafter: Drafter, cache: KVCache, ids: list[int] | Tensor, features: Tensor, spans: list[Span]
) -> DrafterOutput:
    ids = torch.as_tensor(ids, device=features.device)
    at = positions(spans, features.device)
    out: DrafterOutput = drafter(ids, features, at, CachedAttend(cache, spans))
    return out
