"""Proposing tokens: one drafter forward (P-EAGLE) or one a draft token (EAGLE-3).

Shapes: B requests, T packed slots, D drafter hidden, F·E target features.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs. A request under a grammar is drafted through it: each token is the likeliest of those that
are allowed behind the ones before, so that what is proposed can be accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.forward import forward
from peagle.engine.grammar import Matcher, Walk
from peagle.engine.kv_cache import KVCache, Span
from peagle.model.drafter import Drafter, DrafterOutput


class NewSlots(NamedTuple):
    """Newly verified slots of one request; the last one predicts the next token."""

    blocks: Sequence[int]  # of KV cache, room for the placeholders included
    start: int
    ids: list[int]
    features: Tensor  # (len(ids), F·E)
    depth: int  # tokens to draft; 0: the slots are only run
    matcher: Matcher | None = None  # the grammar, behind all verified tokens

    def slot(self, behind: int) -> Span:
        """The slot so many behind the last verified one."""
        return Span(self.blocks, self.start + len(self.ids) - 1 + behind, 1)


class Draft(NamedTuple):
    """What is proposed for one request."""

    tokens: list[int]  # target ids
    sure: list[float]  # the probability the drafter gives each, over what it may say there


class Drafted(NamedTuple):
    """Draft tokens (target ids), those of each request in their order."""

    of: list[int]  # the request of each
    tokens: Tensor  # (len(of),)
    sure: Tensor  # (len(of),) float32 probabilities


@torch.no_grad()
def propose(drafter: Drafter, cache: KVCache, slots: list[NewSlots]) -> list[Draft]:
    """The draft tokens of each of B requests: as many as its depth; fewer where a grammar allows
    nothing more that the drafter knows, or the answer ends."""
    walks = [new.matcher.walk() if new.matcher and new.depth else None for new in slots]
    features = _projected(drafter, [new.features for new in slots])
    run = _parallel if drafter.config.method == "p-eagle" else _autoregressive
    drafts = [Draft([], []) for _ in slots]
    if parts := run(drafter, cache, slots, features, walks):
        # Brought over once, however deep: on a GPU each time would wait for it.
        of = [which for part in parts for which in part.of]
        tokens = torch.cat([part.tokens for part in parts]).tolist()
        sure = torch.cat([part.sure for part in parts]).tolist()
        for which, token, chance in zip(of, tokens, sure, strict=True):
            drafts[which].tokens.append(token)
            drafts[which].sure.append(chance)
    for which, walk in enumerate(walks):
        if walk is not None:
            through = walk.undo()
            drafts[which] = Draft(through, drafts[which].sure[: len(through)])
    return drafts


def passes(drafter: Drafter, slots: list[NewSlots]) -> list[int]:
    """Rows of each forward that `propose` runs."""
    new = sum(len(one.ids) for one in slots)
    if drafter.config.method == "p-eagle":
        return [new + sum(max(0, one.depth - 1) for one in slots)]
    depths = range(1, max(one.depth for one in slots))
    return [new, *(sum(one.depth > depth for one in slots) for depth in depths)]


def _projected(drafter: Drafter, features: list[Tensor]) -> Tensor:
    """(T, D) of the slots, and for P-EAGLE, in the same product, of what fills placeholders."""
    shared = [drafter.mask_hidden[None]] if drafter.config.method == "p-eagle" else []
    return drafter.project(torch.cat([*features, *shared]))


def _choose(drafter: Drafter, logits: Tensor, walks: list[Walk | None]) -> tuple[Tensor, Tensor]:
    """Draft tokens (B,) as target ids from draft logits (B, V), and their probabilities: the
    likeliest, or the likeliest that a grammar allows, with which its walk goes on.

    A token that is the only one allowed is sure to be accepted, so the drafter need not know it.
    """
    logits = logits.float()
    best = logits.max(-1).indices
    tokens, sure = best + drafter.d2t[best], logits.softmax(-1).gather(-1, best[:, None])[:, 0]
    going = [(i, walk) for i, walk in enumerate(walks) if walk is not None and not walk.over]
    if not going:
        return tokens, sure
    rows = [i for i, _ in going]
    allowed = torch.stack([walk.allowed() for _, walk in going]).to(logits.device)  # (·, V_target)
    known = allowed[:, drafter.target_ids]
    masked = logits[rows].masked_fill(~known, float("-inf"))
    most, best = masked.max(-1)
    some = known.any(-1)
    chosen = torch.where(some, best + drafter.d2t[best], allowed.int().argmax(-1))
    usable = some | (allowed.sum(-1) == 1)
    for (_, walk), token, use in zip(going, chosen.tolist(), usable.tolist(), strict=True):
        walk.step(token) if use else walk.stop()
    tokens[rows] = chosen
    sure[rows] = torch.where(some, (most - masked.logsumexp(-1)).exp(), 1.0)
    return tokens, sure


def _parallel(
    drafter: Drafter,
    cache: KVCache,
    slots: list[NewSlots],
    features: Tensor,  # of real slots, then of placeholders
    walks: list[Walk | None],
) -> list[Drafted]:
    """Real slots, then depth − 1 placeholders, in one forward."""
    assert drafter.config.mask_token_id is not None
    ids, parts, spans, first = list[int](), list[Tensor](), list[Span](), list[int]()
    most = max(new.depth for new in slots)
    *reals, filler = features.split([*(len(new.ids) for new in slots), 1])
    for new, real in zip(slots, reals, strict=True):
        more = max(0, new.depth - 1)
        first.append(len(ids) + len(new.ids) - 1)
        ids += new.ids + [drafter.config.mask_token_id] * more
        parts += [real, filler.expand(more, -1)]
        spans.append(Span(new.blocks, new.start, len(new.ids) + more))
    normed = _forward(drafter, cache, ids, torch.cat(parts), spans).normed
    going = [[which for which, new in enumerate(slots) if new.depth > d] for d in range(most)]
    rows = [first[which] + depth for depth, some in enumerate(going) for which in some]
    if not rows:
        return []
    logits = drafter.logits(normed[rows])
    if all(
        walk is None for walk in walks
    ):  # a grammar goes on with the token before: depth by depth
        going = [[which for some in going for which in some]]
    return [
        Drafted(some, *_choose(drafter, part, [walks[which] for which in some]))
        for some, part in zip(going, logits.split([len(some) for some in going]), strict=True)
    ]


def _autoregressive(
    drafter: Drafter,
    cache: KVCache,
    slots: list[NewSlots],
    features: Tensor,
    walks: list[Walk | None],
) -> list[Drafted]:
    """Real slots give the first token; each further slot is fed the token and state before it.
    Behind the end of a draft that a grammar cut short it is fed tokens nobody reads."""
    spans = [Span(new.blocks, new.start, len(new.ids)) for new in slots]
    out = _forward(drafter, cache, [i for new in slots for i in new.ids], features, spans)
    ends = torch.tensor([span.length for span in spans]).cumsum(0).to(features.device) - 1
    going = [which for which, new in enumerate(slots) if new.depth]
    rows, depths = ends[going], list[Drafted]()
    while going:
        logits = drafter.logits(out.normed[rows])
        tokens, sure = _choose(drafter, logits, [walks[which] for which in going])
        depths.append(Drafted(going, tokens, sure))
        still = [at for at, which in enumerate(going) if slots[which].depth > len(depths)]
        if not still:
            break
        recurrent = out.recurrent[rows][still]
        going = [going[at] for at in still]
        spans = [slots[which].slot(len(depths)) for which in going]
        out = _forward(drafter, cache, tokens[still], recurrent, spans)
        rows = torch.arange(len(going), device=features.device)
    return depths


def _forward(
    drafter: Drafter, cache: KVCache, ids: list[int] | Tensor, features: Tensor, spans: list[Span]
) -> DrafterOutput:
    ids = torch.as_tensor(ids, device=features.device)
    out: DrafterOutput = forward(drafter, cache, spans, ids, features)
    return out
