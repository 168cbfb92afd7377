"""What may follow each request, by a drafting method: the likeliest tokens after each path.

Shapes: B requests, T packed slots, R rows, V draft vocabulary.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs. A request under a grammar is drafted through it: only tokens that the grammar allows after a
path are candidates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from peagle.backends.base import DrafterModel
from peagle.backends.batch import slots_of
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine.corrected import CorrectedPlaces
from peagle.engine.grammar import Matcher
from peagle.engine.tree import Candidate, Chance, Offer, Path, Ranked, along
from peagle.methods.base import DraftingPass, Method, NewSlots, Place

SIBLINGS = 16  # candidates after a path, in a tree


@dataclass(frozen=True, slots=True)
class Proposer:
    """A drafter that a backend runs, and what it keeps of running requests."""

    method: Method
    model: DrafterModel
    cache: KVCache
    features: FeatureCache  # the target's, of all tokens that it has run
    said: Tensor | None = None  # by `said_to`; None: the head has no correction

    @torch.no_grad()
    def propose(
        self,
        slots: Sequence[NewSlots],
        matchers: Sequence[Matcher | None] | None = None,
        nodes: int | None = None,
        chance: Chance = lambda _, prob: prob,
    ) -> list[Offer]:
        """What may follow each of B requests, as deep as they ask for. Offers are read before the
        requests' grammars advance.

        `matchers`: the grammar of each request after its verified tokens; None: no request has one.
        `nodes`: the size of the trees; None: chains.
        """
        at = [slot for new in slots for slot in slots_of(new.blocks, new.start, len(new.ids))]
        features = self.features.read(torch.tensor(at))
        siblings = SIBLINGS if nodes and self.method.parallel else 1
        chooser = Chooser(self, slots, matchers or [None] * len(slots), siblings, chance)
        self.method.propose(DraftingPass(self.model, self.cache, slots, features, chooser))
        return chooser.offers()

    def rows(self, slots: Sequence[NewSlots]) -> list[float]:
        """Rows of each forward that `propose` runs."""
        new = sum(len(one.ids) for one in slots)
        depths = range(1, max(one.depth for one in slots))
        return self.method.passes(new, [sum(one.depth > d for one in slots) for d in depths])


class Chooser:
    """Lists the likeliest tokens after each path; see `Choose`.

    Mostly these depend on the depth only, and those of all requests are listed together. With a
    correction they depend on the token before, too: they are scored together for all tokens that
    the head knows to come before. Under a grammar, and in a conditional method, they depend on the
    path. Then they are listed for the paths that `grow` asks for, and for no others.
    """

    def __init__(
        self,
        proposer: Proposer,
        slots: Sequence[NewSlots],
        matchers: Sequence[Matcher | None],
        siblings: int,
        chance: Chance,
    ) -> None:
        self.method = proposer.method
        self.drafter = proposer.model.drafter
        self.said = proposer.said
        self.newest = [new.ids[-1] for new in slots]
        # The token before decides, too: then states are kept, not logits.
        self.conditional = self.method.conditional or self.said is not None
        self.guided = [self.method.conditional or matcher is not None for matcher in matchers]
        self.matchers = dict[tuple[int, Path], Matcher | None]()  # by request and path
        self.matchers.update({(owner, ()): own for owner, own in enumerate(matchers)})
        self.siblings = min(siblings, len(self.drafter.d2t))
        self.chance = chance
        # Of each request, by depth: logits (1, V), or the state (1, D) where they are conditional.
        self.scores = [list[Tensor]() for _ in slots]
        self.listed = [list[Iterable[Candidate]]() for _ in slots]  # of each request, by depth
        self.corrected: CorrectedPlaces | None = None
        self.rows = dict[tuple[int, int], int]()  # there, by request and depth

    def __call__(self, places: list[Place], states: Tensor) -> Tensor:
        """See `Choose`."""
        scores = states
        if not self.conditional:
            scores = self.method.logits(self.drafter, states, None)
        for place, row in zip(places, scores.split(1), strict=True):
            self.scores[place.owner].append(row)
        if self.method.parallel:
            return states.new_empty(0, dtype=torch.int64)
        best = scores.max(-1).indices  # several times faster than argmax on a CPU
        tokens = best + self.drafter.d2t[best]
        for row, (owner, _) in enumerate(places):
            if self.guided[owner]:
                found = self._after(owner, tuple(node.token for node in self._chain(owner)))
                self.listed[owner].append(found)
                tokens[row] = next((node.token for node in found), 0)  # 0: nothing reads it
        return tokens

    def offers(self) -> list[Offer]:
        """What may follow each request."""
        owners = range(len(self.scores))
        free = [(o, d) for o in owners if not self.guided[o] for d in range(len(self.scores[o]))]
        if free and self.said is not None:
            self.rows = {place: row for row, place in enumerate(free)}
            self.corrected = CorrectedPlaces(
                self.drafter,
                self.said,
                torch.cat([self.scores[owner][depth] for owner, depth in free]),
                [depth for _, depth in free],
                [self.newest[owner] for owner, depth in free if depth == 0],
                self.chance,
            )
        elif free:
            logits = torch.cat([self.scores[owner][depth] for owner, depth in free])
            listed = self._likeliest(logits, [depth for _, depth in free])
            for (owner, _), candidates in zip(free, listed, strict=True):
                self.listed[owner].append(candidates)
        if self.method.parallel:
            return [partial(self._after, owner) for owner in owners]
        return [along(self._chain(owner)) for owner in owners]

    def _chain(self, owner: int) -> list[Candidate]:
        """The tokens that were listed for a request, one for each place."""
        return [node for place in self.listed[owner] for node in place]

    def _after(self, owner: int, path: Path) -> Iterable[Candidate]:
        """Candidates after a path of a request."""
        depth = len(path)
        if depth >= len(self.scores[owner]):
            return []
        before = path[-1] if path else self.newest[owner]
        if not self.guided[owner]:
            if self.corrected is not None:
                return self.corrected.after(self.rows[owner, depth], before, self.siblings)
            return self.listed[owner][depth]
        logits = self.scores[owner][depth]
        if self.conditional:
            given = torch.tensor([before], device=logits.device)
            logits = self.method.logits(self.drafter, logits, given)
        if self.matchers[owner, ()] is None:
            return self._likeliest(logits, [depth])[0]
        matcher = self._matcher_after(owner, path)
        return self._allowed(logits, depth, matcher) if matcher else []

    def _matcher_after(self, owner: int, path: Path) -> Matcher | None:
        """The grammar after a path of a request; None after the end of the answer."""
        if (owner, path) not in self.matchers:
            before = self._matcher_after(owner, path[:-1])
            self.matchers[owner, path] = before.after(path[-1]) if before else None
        return self.matchers[owner, path]

    def _allowed(self, logits: Tensor, depth: int, matcher: Matcher) -> Iterable[Candidate]:
        """Candidates that a grammar allows, by draft logits (1, V). A token that alone is allowed
        will be accepted, even if it is not in the draft vocabulary."""
        allowed = matcher.draftable()
        if allowed.sum() == 1:
            return [Candidate(int(allowed.int().argmax()))]
        refused = ~allowed.to(logits.device)[self.drafter.target_ids]
        return self._likeliest(logits.masked_fill(refused, float("-inf")), [depth])[0]

    def _likeliest(self, logits: Tensor, depths: Sequence[int]) -> list[Ranked]:
        """The likeliest tokens by each row of draft logits (R, V), at the depths of the rows."""
        probs, best = logits.float().softmax(-1).topk(self.siblings)
        rows = zip((best + self.drafter.d2t[best]).tolist(), probs.tolist(), depths, strict=True)
        return [Ranked(*row, self.chance) for row in rows]
