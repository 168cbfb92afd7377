"""Proposing tokens: what a drafting method drafts, chosen through each request's grammar.

Shapes: B requests, T packed slots, R rows, F·E target features, V draft vocabulary.

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
from peagle.backends.batch import slots_of
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine.grammar import Matcher, Walk
from peagle.methods.base import DraftingPass, Method, NewSlots
from peagle.model.drafter import Drafter


class Draft(NamedTuple):
    """What is proposed for one request."""

    tokens: list[int]  # target ids
    probs: list[float]  # the drafter's, over what it may propose there


@dataclass(frozen=True, slots=True)
class Proposer:
    """A drafter that a backend runs, and what it keeps of running requests."""

    method: Method
    model: DrafterModel
    cache: KVCache
    features: FeatureCache  # the target's, of all tokens that it has run

    @torch.no_grad()
    def propose(
        self, slots: Sequence[NewSlots], matchers: Sequence[Matcher | None] | None = None
    ) -> list[Draft]:
        """The draft tokens of each of B requests: as many as its depth; fewer where a grammar
        allows nothing more that the drafter knows, or the answer ends. `matchers`: the grammar of
        each request after all its verified tokens; None: no request has one."""
        at = [slot for new in slots for slot in slots_of(new.blocks, new.start, len(new.ids))]
        features = self.features.read(torch.tensor(at))
        walks = list[Walk | None]()
        for new, matcher in zip(slots, matchers or [None] * len(slots), strict=True):
            walks.append(matcher.walk() if matcher and new.depth else None)
        chooser = Chooser(self.model.drafter, walks)
        self.method.propose(DraftingPass(self.model, self.cache, slots, features, chooser))
        return chooser.drafts()

    def rows(self, slots: Sequence[NewSlots]) -> list[float]:
        """Rows of each forward that `propose` runs."""
        new = sum(len(one.ids) for one in slots)
        depths = range(1, max(one.depth for one in slots))
        return self.method.passes(new, [sum(one.depth > d for one in slots) for d in depths])


class Chooser:
    """See `methods.base.Choose`. The likeliest token is chosen, or the likeliest that a request's
    grammar allows, with which its walk goes on."""

    def __init__(self, drafter: Drafter, walks: Sequence[Walk | None]) -> None:
        self.drafter = drafter
        self.walks = walks
        self.owners = list[int]()  # the request of each token
        self.tokens = list[Tensor]()
        self.probs = list[Tensor]()

    def __call__(self, owners: list[list[int]], logits: Tensor) -> Tensor:
        if not any(self.walks):
            return self._choose([owner for some in owners for owner in some], logits)
        # A grammar goes on with the token before: depth by depth.
        parts = zip(owners, logits.split([len(some) for some in owners]), strict=True)
        return torch.cat([self._choose(some, part) for some, part in parts])

    def drafts(self) -> list[Draft]:
        """What was chosen for each request, in order. Ends all walks."""
        drafts = [Draft([], []) for _ in self.walks]
        if self.owners:
            # Brought over once, however deep: on a GPU each time would wait for it.
            tokens = torch.cat(self.tokens).tolist()
            probs = torch.cat(self.probs).tolist()
            for owner, token, prob in zip(self.owners, tokens, probs, strict=True):
                drafts[owner].tokens.append(token)
                drafts[owner].probs.append(prob)
        for owner, walk in enumerate(self.walks):
            if walk is not None:
                through = walk.undo()
                drafts[owner] = Draft(through, drafts[owner].probs[: len(through)])
        return drafts

    def _choose(self, owners: Sequence[int], logits: Tensor) -> Tensor:
        """Choose a token for each owner from draft logits (R, V)."""
        logits = logits.float()
        best = logits.max(-1).indices  # several times faster than argmax on a CPU
        tokens = best + self.drafter.d2t[best]
        probs = logits.softmax(-1).gather(-1, best[:, None])[:, 0]
        going = [(row, walk) for row, i in enumerate(owners) if (walk := _open(self.walks[i]))]
        if going:
            rows = [row for row, _ in going]
            tokens[rows], probs[rows] = self._through([walk for _, walk in going], logits[rows])
        self.owners += owners
        self.tokens.append(tokens)
        self.probs.append(probs)
        return tokens

    def _through(self, walks: list[Walk], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R,) that grammars allow, and their probabilities (R,); the walks go on with them.

        The only token that is allowed is sure to be accepted: the drafter need not know it.
        """
        allowed = torch.stack([walk.allowed() for walk in walks]).to(logits.device)
        known = allowed[:, self.drafter.target_ids]
        masked = logits.masked_fill(~known, float("-inf"))
        most, best = masked.max(-1)
        some = known.any(-1)
        tokens = torch.where(some, best + self.drafter.d2t[best], allowed.int().argmax(-1))
        usable = some | (allowed.sum(-1) == 1)
        for walk, token, use in zip(walks, tokens.tolist(), usable.tolist(), strict=True):
            if use:
                walk.step(token)
            else:
                walk.stop()
        return tokens, torch.where(some, (most - masked.logsumexp(-1)).exp(), 1.0)


def _open(walk: Walk | None) -> Walk | None:
    """A walk that goes on."""
    return None if walk is None or walk.over else walk
