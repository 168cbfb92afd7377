"""Proposing tokens: one drafter forward (P-EAGLE) or one a draft token (EAGLE-3).

Shapes: B requests, T packed slots, D drafter hidden, F·E target features.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.kv_cache import CachedAttend, KVCache, Span, positions
from peagle.model.drafter import Drafter, DrafterOutput


class NewSlots(NamedTuple):
    """Newly verified slots of one request; the last one predicts the next token."""

    blocks: Sequence[int]  # of KV cache, room for the placeholders included
    start: int
    ids: list[int]
    features: Tensor  # (len(ids), F·E)
    depth: int  # tokens to draft; 0: the slots are only run

    def slot(self, behind: int) -> Span:
        """The slot so many behind the last verified one."""
        return Span(self.blocks, self.start + len(self.ids) - 1 + behind, 1)


@torch.no_grad()
def propose(drafter: Drafter, cache: KVCache, slots: list[NewSlots]) -> list[list[int]]:
    """The draft tokens (target ids) of each of B requests."""
    features = drafter.project(torch.cat([s.features for s in slots]))
    if drafter.config.method == "p-eagle":
        return _parallel(drafter, cache, slots, features)
    return _autoregressive(drafter, cache, slots, features)


def _parallel(
    drafter: Drafter, cache: KVCache, slots: list[NewSlots], features: Tensor
) -> list[list[int]]:
    """Real slots, then depth − 1 placeholders, in one forward."""
    assert drafter.config.mask_token_id is not None
    ids, parts, spans, rows = list[int](), list[Tensor](), list[Span](), list[int]()
    most = max(1, *(new.depth for new in slots))
    filler = drafter.placeholders(torch.arange(1, most, device=features.device))
    for new, real in zip(slots, features.split([len(s.ids) for s in slots]), strict=True):
        more = max(0, new.depth - 1)
        ids += new.ids + [drafter.config.mask_token_id] * more
        parts += [real, filler[:more]]
        spans.append(Span(new.blocks, new.start, len(new.ids) + more))
        rows += range(len(ids) - new.depth, len(ids))
    normed = _forward(drafter, cache, ids, torch.cat(parts), spans).normed
    drafted = iter(drafter.draft_tokens(normed[rows]).tolist() if rows else [])
    return [[next(drafted) for _ in range(new.depth)] for new in slots]


def _autoregressive(
    drafter: Drafter, cache: KVCache, slots: list[NewSlots], features: Tensor
) -> list[list[int]]:
    """Real slots give the first token; each further slot is fed the token and state before it."""
    spans = [Span(new.blocks, new.start, len(new.ids)) for new in slots]
    out = _forward(drafter, cache, [i for new in slots for i in new.ids], features, spans)
    ends = torch.tensor([span.length for span in spans]).cumsum(0) - 1
    going = [which for which, new in enumerate(slots) if new.depth]
    rows, passes = ends[going], list[tuple[list[int], Tensor]]()
    while going:
        tokens, recurrent = drafter.draft_tokens(out.normed[rows]), out.recurrent[rows]
        passes.append((going, tokens))
        still = [at for at, which in enumerate(going) if slots[which].depth > len(passes)]
        if not still:
            break
        going = [going[at] for at in still]
        spans = [slots[which].slot(len(passes)) for which in going]
        out = _forward(drafter, cache, tokens[still], recurrent[still], spans)
        rows = torch.arange(len(going))
    drafts: list[list[int]] = [[] for _ in slots]
    for going, tokens in passes:
        for which, token in zip(going, tokens.tolist(), strict=True):
            drafts[which].append(token)
    return drafts


def _forward(
    drafter: Drafter, cache: KVCache, ids: list[int] | Tensor, features: Tensor, spans: list[Span]
) -> DrafterOutput:
    ids = torch.as_tensor(ids, device=features.device)
    at = positions(spans, features.device)
    out: DrafterOutput = drafter(ids, features, at, CachedAttend(cache, spans))
    return out
