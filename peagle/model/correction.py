"""A correction of parallel drafts: it makes a token's logits depend on the token before.

Shapes: R slots, P tokens that may come before one, C candidates, D drafter hidden, r rank,
V draft vocabulary.

P-EAGLE drafts all slots in one pass. So the second slot knows the candidates of the first, but not
the one that was taken: after "a" it may offer what only follows "b". The correction adds to the
logits U of the C likeliest tokens of a slot a term that depends on the token a before it:

    F(b | a) = U(b) + W[b] · (SiLU(H n) ⊙ T E(a))

n is the normed hidden state of the slot, E the head's embedding. The other tokens keep their
probability, so the C candidates keep theirs in all. (DSpark's Markov head and Domino are relatives;
neither reads the hidden state.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.errors import InputError


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """Sizes of a correction."""

    rank: int = 128
    candidates: int = 32  # tokens of a slot that are scored

    def __post_init__(self) -> None:
        for name in ("rank", "candidates"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                why = "must be a whole number of at least 1"
                raise InputError(why, field=f"correction.{name}", value=value)


class Candidates(NamedTuple):
    """The likeliest tokens of R slots, likeliest first; both (R, C)."""

    ids: Tensor  # of the draft vocabulary
    logits: Tensor  # float32 at least


class Correction(nn.Module):
    """See above. It adds nothing before it is trained."""

    def __init__(self, config: CorrectionConfig, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.candidates = min(config.candidates, vocabulary)
        self.state = nn.Linear(hidden, config.rank, bias=False)
        self.before = nn.Linear(hidden, config.rank, bias=False)
        zeros = self.state.weight.new_zeros(vocabulary, config.rank)
        self.token = nn.Embedding.from_pretrained(zeros, freeze=False)

    def likeliest(self, logits: Tensor) -> Candidates:
        """The candidates of slots, by the head's logits (R, V)."""
        best, ids = logits.topk(self.candidates)
        return Candidates(ids, best.to(torch.promote_types(best.dtype, torch.float32)))

    def forward(self, normed: Tensor, candidates: Candidates, projected: Tensor) -> Tensor:
        """Corrected logits (R, P, C) of the candidates of slots (R, D) after each of P tokens, but
        for a constant of each slot and token. `projected` (R, P, r): T E of these
        tokens."""
        after = F.silu(self.state(normed))[:, None] * projected
        return candidates.logits[:, None] + after @ self.token(candidates.ids).mT

    def apply_to(self, logits: Tensor, normed: Tensor, before: Tensor) -> Tensor:
        """Corrected logits (R, V) of slots with the head's `logits` (R, V) and states (R, D), each
        after the token with embedding `before` (R, D)."""
        candidates = self.likeliest(logits)
        scores = self(normed, candidates, self.before(before)[:, None])[:, 0]
        mass = candidates.logits.logsumexp(-1, keepdim=True)
        corrected = scores.log_softmax(-1) + mass
        return logits.scatter(-1, candidates.ids, corrected.to(logits.dtype))
