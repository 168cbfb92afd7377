"""Candidates of places whose head has a correction: they depend on the token before.

Shapes: R places, C candidates of each, D drafter hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.tree import Candidate, Chance
from peagle.model.correction import Candidates
from peagle.model.drafter import Drafter


class CorrectedPlaces:
    """Scored together: each place after the candidates of the place before it. After another token,
    which only lookup or another correction offers, a place is scored when it is asked for."""

    def __init__(
        self,
        drafter: Drafter,
        states: Tensor,  # (R, D) normed, of each request's places in order of depth
        depths: Sequence[int],  # of the places
        newest: Sequence[int],  # the token before each place at depth 0
        siblings: int,
        chance: Chance,
    ) -> None:
        self.drafter, self.states, self.depths = drafter, states, depths
        self.siblings, self.chance = siblings, chance
        assert drafter.correction is not None
        self.correction = drafter.correction
        logits = drafter.logits(states)
        self.candidates = self.correction.likeliest(logits)
        self.normaliser = logits.float().logsumexp(-1)
        self.tokens = self.candidates.ids + drafter.d2t[self.candidates.ids]
        before = self.tokens.roll(1, 0)
        first = [row for row, depth in enumerate(depths) if depth == 0]
        before[first] = torch.tensor(newest, device=before.device)[:, None]
        self.listed = dict[tuple[int, int], list[Candidate]]()  # by place and the token before
        self.rows = [dict(zip(ids, range(len(ids)), strict=True)) for ids in before.tolist()]
        self.probs, self.best = self._scored(slice(None), before)

    def after(self, row: int, token: int) -> list[Candidate]:
        """Candidates of a place after a token, likeliest first."""
        if (row, token) not in self.listed:
            at = self.rows[row].get(token)
            if at is not None:
                probs, best = self.probs[row, at], self.best[row, at]
            else:
                before = torch.tensor([[token]], device=self.states.device)
                probs, best = (part[0, 0] for part in self._scored(slice(row, row + 1), before))
            pairs = zip(best.tolist(), probs.tolist(), strict=True)
            depth = self.depths[row]
            self.listed[row, token] = [Candidate(t, p, self.chance(depth, p)) for t, p in pairs]
        return self.listed[row, token]

    def _scored(self, places: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and target ids of the likeliest candidates of some places, after each of
        the tokens `before` them (R, P); both (R, P, siblings), on the CPU."""
        candidates = Candidates(self.candidates.ids[places], self.candidates.logits[places])
        embedded = self.drafter.embed(before.flatten()).unflatten(0, before.shape)
        scores = self.correction(self.states[places], candidates, embedded)
        best, order = scores.topk(min(self.siblings, scores.shape[-1]))
        tokens = self.tokens[places, None].expand(*scores.shape).gather(-1, order)
        probs = (best - self.normaliser[places, None, None]).exp()
        return probs.cpu(), tokens.cpu()
