"""How far the drafter's distribution is from the target's, over the draft vocabulary.

Shapes: R rows, V draft vocabulary.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["kl", "cross-entropy"]


def divergence(draft_logits: Tensor, target_logits: Tensor, loss: LossName) -> Tensor:
    """Per-row loss (R,) of draft logits (R, V) against target logits (R, V), in float32.

    "kl" is KL(target ‖ draft), the target renormalised over the draft vocabulary; "cross-entropy"
    takes the target's most likely draft token as a hard label.
    """
    draft, target = draft_logits.float(), target_logits.float()
    if loss == "cross-entropy":
        return F.cross_entropy(draft, target.argmax(-1), reduction="none")
    # Σ p (log p − log q) = p·t − lse(t) − p·z + lse(z): no log-softmax of z is kept for backward.
    p = target.softmax(-1)
    cross = draft.logsumexp(-1) - torch.linalg.vecdot(p, draft)
    return cross + torch.linalg.vecdot(p, target) - target.logsumexp(-1)
