"""How far the drafter's distribution is from the target's, over the draft vocabulary.

Shapes: R rows, V draft vocabulary.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["kl", "cross-entropy"]


def divergence(draft_logits: Tensor, target_logits: Tensor, loss: LossName) -> Tensor:
    """Per-row loss (R,) of draft logits (R, V) against target logits (R, V), both in float32.

    "kl" is KL(target ‖ draft), the target renormalised over the draft vocabulary; "cross-entropy"
    takes the target's most likely draft token as a hard label.
    """
    draft = draft_logits.float().log_softmax(-1)
    if loss == "cross-entropy":
        return F.nll_loss(draft, target_logits.argmax(-1), reduction="none")
    target = target_logits.float().log_softmax(-1)
    return (target.exp() * (target - draft)).sum(-1)


def mean_over(total: Tensor, count: int) -> Tensor:
    """Count-normalised loss; a sequence without supervised elements gives zero, not NaN."""
    return total / max(count, 1) if isinstance(total, Tensor) else torch.zeros(())
