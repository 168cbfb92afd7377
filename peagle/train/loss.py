"""How far the drafter's distribution is from the target's, over the draft vocabulary.

Shapes: R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LossName = Literal["kl", "cross-entropy"]


class LossChunk(NamedTuple):
    """A few rows and what the target says there."""

    rows: Tensor  # (R,) of the hidden states
    target_logits: Tensor  # (R, V)


def divergence(draft_logits: Tensor, target_logits: Tensor, loss: LossName) -> Tensor:
    """Per-row loss (R,) of draft logits (R, V) against target logits (R, V), at least in float32.

    "kl" is KL(target ‖ draft), the target renormalised over the draft vocabulary; "cross-entropy"
    takes the target's most likely draft token as a hard label.
    """
    precise = torch.promote_types(draft_logits.dtype, torch.float32)
    draft, target = draft_logits.to(precise), target_logits.to(precise)
    if loss == "cross-entropy":
        return F.cross_entropy(draft, target.argmax(-1), reduction="none")
    # Σ p (log p − log q) = p·t − lse(t) − p·z + lse(z): no log-softmax of z is kept for backward.
    p = target.softmax(-1)
    cross = draft.logsumexp(-1) - torch.linalg.vecdot(p, draft)
    return cross + torch.linalg.vecdot(p, target) - target.logsumexp(-1)


class ChunkedDivergence(torch.autograd.Function):
    """Summed divergence of `normed @ weight.T * scale`, a chunk of logits alive at a time.

    The gradients of a chunk are taken while its logits exist, so that backward only scales them:
    nothing is computed twice, and no logits are kept. Returns (sum, most likely draft ids of the
    chunks' rows in their order).
    """

    @staticmethod
    def forward(  # noqa: PLR0913 (the operands)
        ctx: Any,
        normed: Tensor,  # (E, D)
        weight: Tensor,  # (V, D)
        scale: float,
        chunks: Iterable[LossChunk],
        loss: LossName,
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))
        total, best = total.to(weight.device), [torch.empty(0, dtype=torch.int64).to(weight.device)]
        for_normed, for_weight = torch.zeros_like(normed), torch.zeros_like(weight)
        head = weight.detach().requires_grad_()
        for rows, target_logits in chunks:
            with torch.enable_grad():
                part = normed[rows].detach().requires_grad_()
                logits = F.linear(part, head) * scale
                summed = divergence(logits, target_logits, loss).sum()
            part_grad, head_grad = torch.autograd.grad(summed, (part, head))
            for_normed[rows] = part_grad
            for_weight += head_grad
            total += summed.detach()
            best.append(logits.detach().argmax(-1))
        ctx.save_for_backward(for_normed, for_weight)
        ids = torch.cat(best)
        ctx.mark_non_differentiable(ids)
        return total, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        for_normed, for_weight = ctx.saved_tensors
        return for_normed * upstream, for_weight * upstream, None, None, None
