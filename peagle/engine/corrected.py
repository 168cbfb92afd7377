"""Candidates of places whose head has a correction: they depend on the token before.

Shapes: R places, P tokens before them, C candidates of each, D drafter hidden, r rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.tree import Chance, Ranked
from peagle.model.correction import Candidates
from peagle.model.drafter import Drafter


@torch.no_grad()
def said_to(drafter: Drafter) -> Tensor | None:
    """What each token of the target's vocabulary says to a head's correction about the token after
    it, (target vocabulary, r): a product of the embedding, which no round need repeat."""
    if drafter.correction is None:
        return None
    tokens = torch.arange(drafter.config.transformer.vocab_size, device=drafter.d2t.device)
    parts = [drafter.correction.before(drafter.embed(ids)) for ids in tokens.split(4096)]
    return torch.cat(parts)


class CorrectedPlaces:
    """Scored together: each place after the candidates of the place before it. After another token,
    which only lookup or another correction offers, a place is scored when it is asked for."""

    def __init__(
        self,
        drafter: Drafter,
        said: Tensor,  # by `said_to`
        states: Tensor,  # (R, D) normed, of each request's places in order of depth
        depths: Sequence[int],  # of the places
        newest: Sequence[int],  # the token before each place at depth 0
        chance: Chance,
    ) -> None:
        assert drafter.correction is not None
        self.correction, self.said, self.states = drafter.correction, said, states
        self.depths, self.chance = depths, chance
        probs, ids = drafter.logits(states).float().softmax(-1).topk(self.correction.candidates)
        self.candidates = Candidates(ids, probs.log())
        self.mass = probs.sum(-1)  # (R,) of the candidates
        tokens = ids + drafter.d2t[ids]
        before = tokens.roll(1, 0)
        first = [row for row, depth in enumerate(depths) if depth == 0]
        before[first] = torch.tensor(newest, device=before.device)[:, None]
        self.tokens, self.before = tokens.tolist(), before.tolist()
        self.probs = self._scored(slice(None), before)
        self.ranked = dict[tuple[int, int], Ranked]()  # by place and the token before

    def after(self, row: int, token: int, most: int) -> Ranked:
        """The likeliest candidates of a place after a token, at `most` so many."""
        if (row, token) not in self.ranked:
            if token in self.before[row]:
                probs = self.probs[row, self.before[row].index(token)].tolist()
            else:
                before = torch.tensor([[token]], device=self.states.device)
                probs = self._scored(slice(row, row + 1), before)[0, 0].tolist()
            best = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)[:most]
            tokens = [self.tokens[row][i] for i in best]
            listed = [probs[i] for i in best]
            self.ranked[row, token] = Ranked(tokens, listed, self.depths[row], self.chance)
        return self.ranked[row, token]

    def _scored(self, places: slice, before: Tensor) -> Tensor:
        """Probabilities (R, P, C) of the candidates of some places, after each of the tokens
        `before` them (R, P); on the CPU."""
        candidates = Candidates(self.candidates.ids[places], self.candidates.logits[places])
        scores = self.correction(self.states[places], candidates, self.said[before])
        return (scores.softmax(-1) * self.mass[places, None, None]).cpu()
