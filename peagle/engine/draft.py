"""Proposing K tokens a request: one drafter forward (P-EAGLE) or K of them (EAGLE-3).

Shapes: B requests, T packed slots, D drafter hidden, F·E target features.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs. A request under a grammar is drafted through it: each token is the likeliest of those that
are allowed behind the ones before, so that what is proposed can be accepted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.grammar import Matcher, Walk
from peagle.engine.kv_cache import CachedAttend, KVCache, Span, positions
from peagle.model.drafter import Drafter, DrafterOutput


class NewSlots(NamedTuple):
    """Newly verified slots of one request; the last one predicts the next token."""

    row: int
    start: int
    ids: list[int]
    features: Tensor  # (len(ids), F·E)
    matcher: Matcher | None = None  # the grammar, behind all verified tokens


@torch.no_grad()
def propose(drafter: Drafter, cache: KVCache, slots: list[NewSlots], k: int) -> list[list[int]]:
    """K draft tokens (target ids) for each of B requests; fewer where a grammar allows nothing
    more that the drafter knows, or the answer ends."""
    assert k >= 1
    features = drafter.project(torch.cat([s.features for s in slots]))
    walks = [None if new.matcher is None else new.matcher.walk() for new in slots]
    if drafter.config.method == "p-eagle":
        rows = _parallel(drafter, cache, slots, features, k)
        if not any(walks):
            return drafter.draft_tokens(rows).view(-1, k).tolist()
        logits = drafter.logits(rows).view(len(slots), k, -1)
        tokens = [_choose(drafter, depth, walks) for depth in logits.unbind(1)]
    else:
        tokens = _autoregressive(drafter, cache, slots, features, k, walks)
    drafts = torch.stack(tokens, dim=1).tolist()
    return [walk.undo() if walk else draft for walk, draft in zip(walks, drafts, strict=True)]


def _choose(drafter: Drafter, logits: Tensor, walks: list[Walk | None]) -> Tensor:
    """One depth's draft tokens (B,) as target ids from draft logits (B, V): the likeliest, or the
    likeliest that a grammar allows, with which its walk goes on.

    A token that is the only one allowed is sure to be accepted, so the drafter need not know it.
    """
    best = logits.argmax(-1)
    tokens = best + drafter.d2t[best]
    going = [(i, walk) for i, walk in enumerate(walks) if walk is not None and not walk.over]
    if not going:
        return tokens
    rows = [i for i, _ in going]
    allowed = torch.stack([walk.allowed() for _, walk in going]).to(logits.device)  # (·, V_target)
    known = allowed[:, drafter.target_ids]
    best = logits[rows].masked_fill(~known, float("-inf")).argmax(-1)
    some = known.any(-1)
    chosen = torch.where(some, best + drafter.d2t[best], allowed.int().argmax(-1))
    usable = some | (allowed.sum(-1) == 1)
    for (_, walk), token, use in zip(going, chosen.tolist(), usable.tolist(), strict=True):
        walk.step(token) if use else walk.stop()
    tokens[rows] = chosen
    return tokens


def _parallel(
    drafter: Drafter, cache: KVCache, slots: list[NewSlots], features: Tensor, k: int
) -> Tensor:
    """Real slots, then k − 1 placeholders, in one forward; the k that predict, (B·k, D)."""
    assert drafter.config.mask_token_id is not None
    ids, parts, spans, rows = list[int](), list[Tensor](), list[Span](), list[int]()
    filler = drafter.placeholders(torch.arange(1, k, device=features.device))
    for new, real in zip(slots, features.split([len(s.ids) for s in slots]), strict=True):
        ids += new.ids + [drafter.config.mask_token_id] * (k - 1)
        parts += [real, filler]
        spans.append(Span(new.row, new.start, len(new.ids) + k - 1))
        rows += range(len(ids) - k, len(ids))
    normed = _forward(drafter, cache, ids, torch.cat(parts), spans).normed
    return normed[rows]


def _autoregressive(  # noqa: PLR0913
    drafter: Drafter,
    cache: KVCache,
    slots: list[NewSlots],
    features: Tensor,
    k: int,
    walks: list[Walk | None],
) -> list[Tensor]:
    """Real slots give the first token; each further slot is fed the token and state before it.
    Behind the end of a draft that a grammar cut short it is fed tokens nobody reads."""
    spans = [Span(new.row, new.start, len(new.ids)) for new in slots]
    out = _forward(drafter, cache, [i for new in slots for i in new.ids], features, spans)
    last = torch.tensor([span.length for span in spans]).cumsum(0) - 1
    drafts = [_choose(drafter, drafter.logits(out.normed[last]), walks)]
    recurrent = out.recurrent[last]
    spans = [Span(span.row, span.start + span.length, 1) for span in spans]
    for _ in range(k - 1):
        out = _forward(drafter, cache, drafts[-1], recurrent, spans)
        drafts.append(_choose(drafter, drafter.logits(out.normed), walks))
        recurrent = out.recurrent
        spans = [span._replace(start=span.start + 1) for span in spans]
    return drafts


def _forward(
    drafter: Drafter, cache: KVCache, ids: list[int] | Tensor, features: Tensor, spans: list[Span]
) -> DrafterOutput:
    ids = torch.as_tensor(ids, device=features.device)
    at = positions(spans, features.device)
    out: DrafterOutput = drafter(ids, features, at, CachedAttend(cache, spans))
    return out
