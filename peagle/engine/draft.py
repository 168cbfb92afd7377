"""Proposing tokens: what a drafting method drafts, chosen through each request's grammar.

Shapes: B requests, T packed slots, R rows, F·E target features, V draft vocabulary.

A request with m verified tokens enters with its new slots start … m−1: slot i holds token x[i+1]
and feature h[i]. Drafter keys at slots ≥ m are never kept: the next round computes them from real
inputs. A request under a grammar is drafted through it: each token is the likeliest of those that
are allowed after the ones before, so that what is proposed can be accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest

import torch
from torch import Tensor

from peagle.backends.base import DrafterModel
from peagle.backends.batch import slots_of
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.engine.grammar import Matcher
from peagle.engine.tree import Candidate, Chance, Offer, Path, along
from peagle.methods.base import DraftingPass, Method, NewSlots
from peagle.model.drafter import Drafter

SIBLINGS = 16  # tokens of a place that are tried, at most
CHAIN = 1 << 16  # more nodes than a chain has
Reached = dict[tuple[int, Path], Matcher]  # by request and path: where its grammar stands


@dataclass(frozen=True, slots=True)
class Proposer:
    """A drafter that a backend runs, and what it keeps of running requests."""

    method: Method
    model: DrafterModel
    cache: KVCache
    features: FeatureCache  # the target's, of all tokens that it has run

    @torch.no_grad()
    def propose(
        self,
        slots: Sequence[NewSlots],
        matchers: Sequence[Matcher | None] | None = None,
        nodes: int | None = None,
        chance: Chance = lambda _, prob: prob,
    ) -> list[Offer]:
        """What may follow each of B requests, as deep as they ask for: chains, or, where the method
        drafts all places at once, what a tree of `nodes` nodes is made of; less where a grammar
        allows nothing more that the drafter knows, or the answer ends. `matchers`: the grammar of
        each request after all its verified tokens; None: no request has one."""
        at = [slot for new in slots for slot in slots_of(new.blocks, new.start, len(new.ids))]
        features = self.features.read(torch.tensor(at))
        matchers = matchers or [None] * len(slots)
        drafter = self.model.drafter
        chooser: Chains | Trees
        if self.method.parallel:
            newest = [new.ids[-1] for new in slots]
            chooser = Trees(self.method, drafter, newest, matchers, nodes, chance)
        else:
            chooser = Chains(drafter, matchers, chance)
        self.method.propose(DraftingPass(self.model, self.cache, slots, features, chooser))
        return chooser.offers()

    def rows(self, slots: Sequence[NewSlots]) -> list[float]:
        """Rows of each forward that `propose` runs."""
        new = sum(len(one.ids) for one in slots)
        depths = range(1, max(one.depth for one in slots))
        return self.method.passes(new, [sum(one.depth > d for one in slots) for d in depths])


class Chains:
    """See `methods.base.Choose`, of methods that draft place by place. The likeliest token is
    chosen, or the likeliest that a request's grammar allows."""

    def __init__(
        self, drafter: Drafter, matchers: Sequence[Matcher | None], chance: Chance
    ) -> None:
        self.drafter = drafter
        # Where requests are in their grammars, and how many tokens these have let through.
        self.open = {at: matcher for at, matcher in enumerate(matchers) if matcher}
        self.through = dict.fromkeys(self.open, 0)
        self.chance = chance
        self.owners = list[int]()  # the request of each token
        self.tokens = list[Tensor]()
        self.probs = list[Tensor]()
        self.count = len(matchers)

    def places(self, owners: list[list[int]], states: Tensor) -> None:
        raise NotImplementedError("a chain is drafted place by place")

    def offers(self) -> list[Offer]:
        """What was chosen for each request, in order."""
        chains = [list[Candidate]() for _ in range(self.count)]
        if self.owners:
            # Brought over once, however deep: on a GPU each time would wait for it.
            tokens = torch.cat(self.tokens).tolist()
            probs = torch.cat(self.probs).tolist()
            for owner, token, prob in zip(self.owners, tokens, probs, strict=True):
                chance = self.chance(len(chains[owner]), prob)
                chains[owner].append(Candidate(token, prob, chance))
        return [along(chain[: self.through.get(at)]) for at, chain in enumerate(chains)]

    def __call__(self, owners: list[int], logits: Tensor) -> Tensor:
        """See `Choose`."""
        logits = logits.float()
        best = logits.max(-1).indices  # several times faster than argmax on a CPU
        tokens = best + self.drafter.d2t[best]
        probs = logits.softmax(-1).gather(-1, best[:, None])[:, 0]
        rows = [row for row, owner in enumerate(owners) if owner in self.open]
        if rows:
            going = [owners[row] for row in rows]
            tokens[rows], probs[rows] = self._through(going, logits[rows])
        self.owners += owners
        self.tokens.append(tokens)
        self.probs.append(probs)
        return tokens

    def _through(self, owners: list[int], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R,) that the grammars of their owners allow, and their probabilities (R,); the
        grammars go on with them.

        The only token that is allowed is sure to be accepted: the drafter need not know it.
        """
        matchers = [self.open.pop(owner) for owner in owners]
        allowed = torch.stack([matcher.draftable() for matcher in matchers]).to(logits.device)
        known = allowed[:, self.drafter.target_ids]
        masked = logits.masked_fill(~known, float("-inf"))
        most, best = masked.max(-1)
        some = known.any(-1)
        tokens = torch.where(some, best + self.drafter.d2t[best], allowed.int().argmax(-1))
        usable = some | (allowed.sum(-1) == 1)
        found = zip(owners, matchers, tokens.tolist(), usable.tolist(), strict=True)
        for owner, matcher, token, use in found:
            self.through[owner] += use
            if use and (after := matcher.after(token)):
                self.open[owner] = after
        return tokens, torch.where(some, (most - masked.logsumexp(-1)).exp(), 1.0)


class Trees:
    """See `methods.base.Choose`, of methods that draft all places at once."""

    def __init__(  # noqa: PLR0913 (what trees are made of)
        self,
        method: Method,
        drafter: Drafter,
        newest: list[int],
        matchers: Sequence[Matcher | None],
        nodes: int | None,
        chance: Chance,
    ) -> None:
        """`newest`: the last verified token of each request; `nodes`: of each tree, at most; None:
        chains of the likeliest tokens."""
        self.method = method
        self.drafter = drafter
        self.newest = newest
        self.matchers = matchers
        self.siblings = SIBLINGS if nodes else 1
        self.nodes = nodes or CHAIN
        self.chance = chance
        self.offered: list[Offer] = [along([]) for _ in newest]

    def __call__(self, owners: list[int], logits: Tensor) -> Tensor:
        raise NotImplementedError("a tree needs all places at once")

    def places(self, owners: list[list[int]], states: Tensor) -> None:
        """See `Choose.places`."""
        if self.method.conditional or any(self.matchers):
            self._path_by_path(owners, states)
        else:
            self._place_by_place(owners, states)

    def offers(self) -> list[Offer]:
        """What may follow each request, in order."""
        return self.offered

    def _place_by_place(self, owners: list[list[int]], states: Tensor) -> None:
        """What may follow depends on nothing but the place."""
        every = [(depth, owner) for depth, some in enumerate(owners) for owner in some]
        logits = self.method.logits(self.drafter, states, None)
        listed = self._likeliest(logits, [depth for depth, _ in every])
        places = [list[list[Candidate]]() for _ in self.newest]
        for (_, owner), candidates in zip(every, listed, strict=True):
            places[owner].append(candidates)
        for owner, own in enumerate(places):
            self.offered[owner] = partial(_at, own)

    def _path_by_path(self, owners: list[list[int]], states: Tensor) -> None:
        """Depth by depth: what may follow the likeliest paths so far. No other path can be one of
        the likeliest tree's."""
        offers = [dict[Path, list[Candidate]]() for _ in self.newest]
        beams: list[list[tuple[float, Path]]] = [[(1.0, ())] for _ in self.newest]
        reached: Reached = {(i, ()): own for i, own in enumerate(self.matchers) if own}
        conditional = self.method.conditional
        rows_of = states if conditional else self.method.logits(self.drafter, states, None)
        parts = rows_of.split([len(some) for some in owners])
        for depth, (some, part) in enumerate(zip(owners, parts, strict=True)):
            rows = [(at, i, path) for at, i in enumerate(some) for _, path in beams[i]]
            if not rows:
                break
            logits = part[[at for at, _, _ in rows]]
            if conditional:
                before = [path[-1] if path else self.newest[i] for _, i, path in rows]
                given = torch.tensor(before, device=part.device)
                logits = self.method.logits(self.drafter, logits, given)
            matchers = [reached.get((i, path)) for _, i, path in rows]
            found = self._allowed(logits, depth, matchers)
            for (_, i, path), candidates in zip(rows, found, strict=True):
                offers[i][path] = candidates
            for i in some:
                longer = [
                    (chance * after.chance, (*path, after.token))
                    for chance, path in beams[i]
                    for after in offers[i][path]
                ]
                beams[i] = nlargest(self.nodes, longer)
                if self.matchers[i]:
                    beams[i] = _further(reached, i, beams[i])
        for owner, own in enumerate(offers):
            self.offered[owner] = partial(_behind, own)

    def _allowed(
        self, logits: Tensor, depth: int, matchers: list[Matcher | None]
    ) -> list[list[Candidate]]:
        """What grammars let follow, by logits (R, V), which change. The only token that is allowed
        is sure to be accepted: the drafter need not know it."""
        masks = [matcher.draftable() if matcher else None for matcher in matchers]
        forced = dict[int, Candidate]()
        for row, mask in enumerate(masks):
            if mask is not None:
                unknown = ~mask.to(logits.device)[self.drafter.target_ids]
                logits[row] = logits[row].masked_fill(unknown, float("-inf"))
                if mask.sum() == 1:
                    forced[row] = Candidate(int(mask.int().argmax()))
        listed = self._likeliest(logits, [depth] * len(logits))
        return [[forced[row]] if row in forced else own for row, own in enumerate(listed)]

    def _likeliest(self, logits: Tensor, depths: list[int]) -> list[list[Candidate]]:
        """The likeliest tokens by each row of draft logits (R, V), which stand at `depths`."""
        count = min(self.siblings, logits.shape[-1])
        probs, best = logits.float().softmax(-1).topk(count)
        tokens = (best + self.drafter.d2t[best]).tolist()
        rows = zip(depths, tokens, probs.tolist(), strict=True)
        return [
            [Candidate(t, p, self.chance(depth, p)) for t, p in zip(own, row, strict=True) if p > 0]
            for depth, own, row in rows
        ]


def _at(places: list[list[Candidate]], path: Path) -> list[Candidate]:
    return places[len(path)] if len(path) < len(places) else []


def _behind(paths: dict[Path, list[Candidate]], path: Path) -> list[Candidate]:
    return paths.get(path, [])


def _further(
    reached: Reached, owner: int, beam: list[tuple[float, Path]]
) -> list[tuple[float, Path]]:
    """Those paths of a request behind which its grammar goes on; where it stands there is noted."""
    going = list[tuple[float, Path]]()
    for chance, path in beam:
        if matcher := reached[owner, path[:-1]].after(path[-1]):
            reached[owner, path] = matcher
            going.append((chance, path))
    return going
