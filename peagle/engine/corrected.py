"""Candidates of a head with a correction: they depend on the token before.

Shapes: B requests, R rows, P tokens before them, C candidates of each, D drafter hidden, r rank.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.backends.ranking import ranking
from peagle.engine.tree import Candidate, Chance, Offer, Path, Ranked
from peagle.model.drafter import Candidates, Drafter


@torch.no_grad()
def correction_table(drafter: Drafter) -> Tensor | None:
    """The correction's projection of every token's embedding, (target vocabulary, r); None without
    a correction."""
    if drafter.correction is None:
        return None
    tokens = torch.arange(drafter.config.transformer.vocab_size, device=drafter.d2t.device)
    parts = [drafter.correction.before(drafter.embed(ids)) for ids in tokens.split(4096)]
    return torch.cat(parts)


class Drafted(NamedTuple):
    """States that predict the draft tokens of B requests."""

    normed: Tensor  # (R, D)
    rows: list[range]  # rows of each request, by depth
    newest: list[int]  # the token before each draft

    @property
    def depths(self) -> list[int]:
        """The depth of each row."""
        return [row - rows.start for rows in self.rows for row in rows]


def _tokens_before(drafted: Drafted, tokens: Tensor) -> Tensor:
    """Tokens (R, C) that may come before each row: the candidates `tokens` (R, C) of the row before
    it, or the newest token."""
    before = torch.empty_like(tokens)
    for rows, newest in zip(drafted.rows, drafted.newest, strict=True):
        if rows:
            before[rows.start] = newest
            before[rows.start + 1 : rows.stop] = tokens[rows.start : rows.stop - 1]
    return before


class CorrectedScores:
    """Probabilities of candidates given the token before. Each row is scored at once after all
    candidates of the row before it, and after another token (lookup's) on request."""

    def __init__(
        self, drafter: Drafter, table: Tensor, drafted: Drafted, siblings: int, chance: Chance
    ) -> None:
        """`table`: by `correction_table`. `siblings`: candidates after a path."""
        assert drafter.correction is not None
        self.correction = drafter.correction
        self.table = table
        self.drafted = drafted
        self.siblings = siblings
        self.chance = chance
        self.depths = drafted.depths
        logits = drafter.logits(drafted.normed)
        probs, ids = ranking(logits).likeliest(logits, self.correction.candidates)
        self.candidates = Candidates(ids, probs.log())
        self.mass = probs.sum(-1)  # (R,) of the candidates
        tokens = ids + drafter.d2t[ids]
        before = _tokens_before(drafted, tokens)
        self.tokens = tokens.tolist()
        self.before = before.tolist()
        self.probs = self._score(slice(None), before)
        self.ranked = dict[tuple[int, int], Ranked]()  # by row and the token before

    def offers(self) -> list[Offer]:
        """An offer for each request."""
        requests = zip(self.drafted.rows, self.drafted.newest, strict=True)
        return [partial(self._after, rows, newest) for rows, newest in requests]

    def _after(self, rows: range, newest: int, path: Path) -> Iterable[Candidate]:
        if len(path) >= len(rows):
            return ()
        return self.after(rows[len(path)], [newest, *path][-1])

    def after(self, row: int, token: int) -> Ranked:
        """The likeliest candidates of a row after a token."""
        if (row, token) not in self.ranked:
            if token in self.before[row]:
                probs = self.probs[row, self.before[row].index(token)].tolist()
            else:
                before = torch.tensor([[token]], device=self.table.device)
                probs = self._score(slice(row, row + 1), before)[0, 0].tolist()
            best = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)[: self.siblings]
            tokens = [self.tokens[row][i] for i in best]
            listed = [probs[i] for i in best]
            self.ranked[row, token] = Ranked(tokens, listed, self.depths[row], self.chance)
        return self.ranked[row, token]

    def _score(self, rows: slice, before: Tensor) -> Tensor:
        """Probabilities (R, P, C) of the candidates of some rows, after each of the tokens `before`
        them (R, P); on the CPU."""
        candidates = Candidates(self.candidates.ids[rows], self.candidates.logits[rows])
        scores = self.correction(self.drafted.normed[rows], candidates, self.table[before])
        return (scores.softmax(-1) * self.mass[rows, None, None]).cpu()
