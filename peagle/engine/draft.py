"""Proposing tokens: one drafter forward (P-EAGLE) or one a draft token (EAGLE-3).

Shapes: B requests, T packed slots, D drafter hidden, F·E target features, V draft vocabulary.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs. A request under a grammar is drafted through it: each token is the likeliest of those that
are allowed after the ones before, so that what is proposed can be accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.backends.base import DrafterModel
from peagle.backends.batch import Batch, Span, slots_of
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine.grammar import Matcher, Walk
from peagle.model.drafter import Drafter


class NewSlots(NamedTuple):
    """Newly verified slots of one request; the last one predicts the next token."""

    blocks: Sequence[int]  # of KV cache, room for the placeholders included
    start: int
    ids: list[int]
    depth: int  # tokens to draft; 0: the slots are only run
    matcher: Matcher | None = None  # the grammar, after all verified tokens


class Draft(NamedTuple):
    """What is proposed for one request."""

    tokens: list[int]  # target ids
    probs: list[float]  # the drafter's, over what it may propose there


class Chosen(NamedTuple):
    """Draft tokens of one forward, those of each request in their order."""

    owners: list[int]  # the request of each token
    tokens: Tensor  # (len(owners),) target ids
    probs: Tensor  # (len(owners),) float32


@dataclass(frozen=True, slots=True)
class Proposer:
    """A drafter that a backend runs, and what it keeps of running requests."""

    drafter: Drafter
    model: DrafterModel
    cache: KVCache
    features: FeatureCache  # the target's, of all tokens that it has run

    @property
    def parallel(self) -> bool:
        """All tokens come of one forward."""
        return self.drafter.config.method == "p-eagle"

    @torch.no_grad()
    def propose(self, slots: list[NewSlots]) -> list[Draft]:
        """The draft tokens of each of B requests: as many as its depth; fewer where a grammar
        allows nothing more that the drafter knows, or the answer ends."""
        at = [slot for new in slots for slot in slots_of(new.blocks, new.start, len(new.ids))]
        features = self.features.read(torch.tensor(at))
        walks = [new.matcher.walk() if new.matcher and new.depth else None for new in slots]
        run = self._in_parallel if self.parallel else self._one_by_one
        drafts = [Draft([], []) for _ in slots]
        if parts := run(slots, features, walks):
            # Brought over once, however deep: on a GPU each time would wait for it.
            owners = [owner for part in parts for owner in part.owners]
            tokens = torch.cat([part.tokens for part in parts]).tolist()
            probs = torch.cat([part.probs for part in parts]).tolist()
            for owner, token, prob in zip(owners, tokens, probs, strict=True):
                drafts[owner].tokens.append(token)
                drafts[owner].probs.append(prob)
        for owner, walk in enumerate(walks):
            if walk is not None:
                through = walk.undo()
                drafts[owner] = Draft(through, drafts[owner].probs[: len(through)])
        return drafts

    def rows(self, slots: list[NewSlots]) -> list[int]:
        """Rows of each forward that `propose` runs."""
        new = sum(len(one.ids) for one in slots)
        if self.parallel:
            return [new + sum(max(0, one.depth - 1) for one in slots)]
        depths = range(1, max(one.depth for one in slots))
        return [new, *(sum(one.depth > depth for one in slots) for depth in depths)]

    def _in_parallel(
        self, slots: list[NewSlots], features: Tensor, walks: list[Walk | None]
    ) -> list[Chosen]:
        """Real slots, then depth − 1 placeholders, in one forward."""
        mask_id = self.drafter.config.mask_token_id
        assert mask_id is not None
        # The placeholders' feature is projected in the same product.
        projected = self.model.project(torch.cat([features, self.drafter.mask_hidden[None]]))
        *reals, filler = projected.split([*(len(new.ids) for new in slots), 1])
        parts, spans, first = list[Tensor](), list[Span](), list[int]()
        rows = 0
        for new, real in zip(slots, reals, strict=True):
            more = max(0, new.depth - 1)
            parts += [real, filler.expand(more, -1)]
            spans.append(Span(new.blocks, new.start, [*new.ids, *[mask_id] * more]))
            first.append(rows + len(new.ids) - 1)
            rows += len(new.ids) + more
        normed = self.model.forward(Batch.of(spans), torch.cat(parts), self.cache).normed
        deepest = max(new.depth for new in slots)
        owners = [[i for i, new in enumerate(slots) if new.depth > d] for d in range(deepest)]
        at = [first[i] + depth for depth, some in enumerate(owners) for i in some]
        if not at:
            return []
        logits = self.model.logits(normed[at])
        if not any(walks):  # a grammar goes on with the token before: depth by depth
            owners = [[i for some in owners for i in some]]
        split = zip(owners, logits.split([len(some) for some in owners]), strict=True)
        return [self._choose(some, part, walks) for some, part in split]

    def _one_by_one(
        self, slots: list[NewSlots], features: Tensor, walks: list[Walk | None]
    ) -> list[Chosen]:
        """Real slots give the first token; each further slot is fed the token and state before it.
        After the end of a draft that a grammar cut short it is fed tokens nobody reads."""
        batch = Batch.of([Span(new.blocks, new.start, new.ids) for new in slots])
        out = self.model.forward(batch, self.model.project(features), self.cache)
        owners = [i for i, new in enumerate(slots) if new.depth]
        rows = (batch.query_lens.cumsum(0) - 1)[owners].to(features.device)
        depths = list[Chosen]()
        while owners:
            chosen = self._choose(owners, self.model.logits(out.normed[rows]), walks)
            depths.append(chosen)
            still = [at for at, i in enumerate(owners) if slots[i].depth > len(depths)]
            if not still:
                break
            recurrent = out.recurrent[rows][still]
            owners = [owners[at] for at in still]
            ends = [slots[i].start + len(slots[i].ids) - 1 + len(depths) for i in owners]
            spans = [Span(slots[i].blocks, end, [0]) for i, end in zip(owners, ends, strict=True)]
            batch = Batch.of(spans, chosen.tokens[still])
            out = self.model.forward(batch, recurrent, self.cache)
            rows = torch.arange(len(owners), device=features.device)
        return depths

    def _choose(self, owners: list[int], logits: Tensor, walks: list[Walk | None]) -> Chosen:
        """Draft tokens from draft logits (B, V): the likeliest, or the likeliest that a grammar
        allows, with which its walk goes on.

        The only token that is allowed is sure to be accepted: the drafter need not know it.
        """
        d2t = self.drafter.d2t
        logits = logits.float()
        best = logits.max(-1).indices  # several times faster than argmax on a CPU
        tokens = best + d2t[best]
        probs = logits.softmax(-1).gather(-1, best[:, None])[:, 0]
        going = [(row, walk) for row, i in enumerate(owners) if (walk := _open(walks[i]))]
        if not going:
            return Chosen(owners, tokens, probs)
        rows = [row for row, _ in going]
        allowed = torch.stack([walk.allowed() for _, walk in going]).to(logits.device)
        known = allowed[:, self.drafter.target_ids]
        masked = logits[rows].masked_fill(~known, float("-inf"))
        most, best = masked.max(-1)
        some = known.any(-1)
        chosen = torch.where(some, best + d2t[best], allowed.int().argmax(-1))
        usable = some | (allowed.sum(-1) == 1)
        for (_, walk), token, use in zip(going, chosen.tolist(), usable.tolist(), strict=True):
            if use:
                walk.step(token)
            else:
                walk.stop()
        tokens[rows] = chosen
        probs[rows] = torch.where(some, (most - masked.logsumexp(-1)).exp(), 1.0)
        return Chosen(owners, tokens, probs)


def _open(walk: Walk | None) -> Walk | None:
    """A walk that goes on."""
    return None if walk is None or walk.over else walk
