"""Drafts of each request, by a drafting method: the likeliest tokens after each path.

Shapes: B requests, T packed slots, R rows, D drafter hidden, V draft vocabulary.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs. A request under a grammar is drafted through it: only tokens that the grammar allows after a
path are candidates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.backends.batch import slots_of
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.backends.ranking import ranking
from peagle.engine.corrected import CorrectedScores, Drafted
from peagle.engine.grammar import Matcher
from peagle.engine.tree import Candidate, Chance, Offer, Path, Ranked, along
from peagle.methods.base import DraftPass, DraftSteps, Method, NewSlots, advance
from peagle.model.drafter import Drafter

if TYPE_CHECKING:
    from peagle.backends.base import DrafterModel

SIBLINGS = 16  # candidates after a path, in a tree


@dataclass(frozen=True, slots=True)
class Proposer:
    """A drafter that a backend runs, and its caches of running requests."""

    method: Method
    model: "DrafterModel"
    cache: KVCache
    features: FeatureCache  # the target's, of all tokens that it has run
    correction_table: Tensor | None = None  # None: the head has no correction

    @torch.no_grad()
    def propose(
        self,
        slots: Sequence[NewSlots],
        matchers: Sequence[Matcher | None],
        nodes: int | None,
        chance: Chance,
    ) -> list[Offer]:
        """Draft for B requests, as deep as they ask for. Offers are read before the requests'
        grammars advance.

        `matchers`: the grammar of each request after its verified tokens; None: it has none.
        `nodes`: the size of the trees; None: chains.
        """
        at = [slot for new in slots for slot in slots_of(new.blocks, new.start, len(new.ids))]
        features = self.features.read(torch.tensor(at))
        steps = self.method.draft(DraftPass(self.model, self.cache, slots, features))
        siblings = SIBLINGS if nodes and self.method.parallel else 1
        scorer = Scorer(self.method, self.model.drafter, self.correction_table, siblings, chance)
        if not self.method.parallel:
            return scorer.chains(steps, matchers)
        states = next(steps, None)
        if states is None:
            return [along([])] * len(slots)
        ends = accumulate(new.depth for new in slots)
        rows = [range(end - new.depth, end) for new, end in zip(slots, ends, strict=True)]
        drafted = Drafted(states.normed, rows, [new.ids[-1] for new in slots])
        return scorer.trees(drafted, matchers)

    def rows(self, slots: Sequence[NewSlots]) -> list[float]:
        """Rows of each forward that `propose` runs."""
        new = sum(len(one.ids) for one in slots)
        depths = range(1, max(one.depth for one in slots))
        return self.method.passes(new, [sum(one.depth > d for one in slots) for d in depths])


@dataclass(frozen=True, slots=True)
class Scorer:
    """Makes offers from a drafter's states."""

    method: Method
    drafter: Drafter
    correction_table: Tensor | None
    siblings: int  # candidates after a path
    chance: Chance

    def trees(self, drafted: Drafted, matchers: Sequence[Matcher | None]) -> list[Offer]:
        """Offers of a parallel method."""
        normed, rows, newest = drafted
        offers: list[Offer] = [along([])] * len(rows)

        def score(row: int, before: int) -> Tensor:
            """The draft logits (V,) of a row, given the token before."""
            previous = torch.tensor([before], device=normed.device)
            return self.method.logits(self.drafter, normed[row : row + 1], previous)[0]

        if self.correction_table is not None:
            table, size = self.correction_table, self.siblings
            offers = CorrectedScores(self.drafter, table, drafted, size, self.chance).offers()
        elif not self.method.conditional:
            logits = self.method.logits(self.drafter, normed, None)
            ranked = self.rank(logits, drafted.depths)
            offers = [by_depth(ranked[each.start : each.stop]) for each in rows]
            score = lambda row, before: logits[row]  # noqa: E731 (the same, known already)
        for at, matcher in enumerate(matchers):
            if self.method.conditional or matcher is not None:
                offers[at] = self.guided(score, rows[at], newest[at], matcher)
        return offers

    def guided(
        self, score: Callable[[int, int], Tensor], rows: range, newest: int, matcher: Matcher | None
    ) -> Offer:
        """Candidates of a request that depend on the path: it has a grammar, or the method's logits
        depend on the token before. Only the paths that a tree reaches are scored.

        `score`: logits (V,) of a row, given the token before. `rows`: the request's, by depth.
        """
        guide = None if matcher is None else Guide(matcher)

        def offer(path: Path) -> Iterable[Candidate]:
            depth = len(path)
            if depth >= len(rows):
                return ()
            logits = score(rows[depth], [newest, *path][-1])
            if guide is None:
                return self.rank(logits[None], [depth])[0]
            return self.allowed(logits, depth, guide.after(path))

        return offer

    def chains(self, steps: DraftSteps, matchers: Sequence[Matcher | None]) -> list[Offer]:
        """Offers of a method that drafts one token after another. Where no grammar limits it, a
        token stays on its device until all are drafted."""
        chains = [list[Candidate]() for _ in matchers]
        guides = {at: Guide(matcher) for at, matcher in enumerate(matchers) if matcher is not None}
        logits, owners, depths = list[Tensor](), list[int](), list[int]()
        drafted = next(steps, None)
        while drafted is not None:
            depth = len(logits)
            logits.append(self.method.logits(self.drafter, drafted.normed, None))
            owners += drafted.owners
            depths += [depth] * len(drafted.owners)
            best = ranking(logits[-1]).best(logits[-1])[1]
            tokens = best + self.drafter.d2t[best]
            for row, owner in enumerate(drafted.owners):
                if owner in guides:
                    path = tuple(node.token for node in chains[owner])
                    found = self.allowed(logits[-1][row], depth, guides[owner].after(path))
                    chains[owner] += found
                    tokens[row] = next((node.token for node in found), 0)  # 0: nothing reads it
            drafted = advance(steps, tokens)
        ranked = self.rank(torch.cat(logits), depths) if logits else []
        for owner, candidates in zip(owners, ranked, strict=True):
            if owner not in guides:
                chains[owner] += candidates
        return [along(chain) for chain in chains]

    def rank(self, logits: Tensor, depths: Sequence[int]) -> list[Ranked]:
        """The likeliest tokens by each row of draft logits (R, V), at the depths of the rows."""
        siblings = min(self.siblings, logits.shape[-1])
        probs, best = ranking(logits).likeliest(logits, siblings)
        rows = zip((best + self.drafter.d2t[best]).tolist(), probs.tolist(), depths, strict=True)
        return [Ranked(*row, self.chance) for row in rows]

    def allowed(self, logits: Tensor, depth: int, matcher: Matcher | None) -> Iterable[Candidate]:
        """Candidates that a grammar allows, by draft logits (V,); none after the answer's end. A
        token that alone is allowed will be accepted, even outside the draft vocabulary."""
        if matcher is None:
            return []
        allowed = matcher.draftable()
        if allowed.sum() == 1:
            return [Candidate(int(allowed.int().argmax()))]
        refused = ~allowed.to(logits.device)[self.drafter.target_ids]
        return self.rank(logits.masked_fill(refused, float("-inf"))[None], [depth])[0]


def by_depth(candidates: Sequence[Ranked]) -> Offer:
    """The same candidates after every path of a length."""
    return lambda path: candidates[len(path)] if len(path) < len(candidates) else ()


class Guide:
    """A grammar along the paths of a draft."""

    def __init__(self, matcher: Matcher) -> None:
        self._known: dict[Path, Matcher | None] = {(): matcher}

    def after(self, path: Path) -> Matcher | None:
        """The grammar after a path; None after the end of the answer."""
        if path not in self._known:
            before = self.after(path[:-1])
            self._known[path] = before.after(path[-1]) if before else None
        return self._known[path]
