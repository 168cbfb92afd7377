"""How far the drafter's distribution is from the target's, over the draft vocabulary.

Shapes: R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.train.tiles import whole_tiles

LossName = Literal["kl", "cross-entropy"]


class LossChunk(NamedTuple):
    """A few rows and what the target says there."""

    rows: Tensor  # (R,) of the hidden states
    target_logits: Tensor  # (R, V)


class Divergence(NamedTuple):
    """Of R rows, in float32 at least."""

    each: Tensor  # (R,)
    gradient: Tensor  # (R, V) of the sum, by the draft logits


def divergence(draft_logits: Tensor, target_logits: Tensor, loss: LossName) -> Divergence:
    """Of draft logits (R, V) from target logits (R, V).

    "kl" is KL(target ‖ draft), the target renormalised over the draft vocabulary; "cross-entropy"
    takes the target's most likely draft token as a hard label. Written out with its gradient,
    softmax(draft) − target's distribution: autograd reads and writes (R, V) twice as often.
    """
    precise = torch.promote_types(draft_logits.dtype, torch.float32)
    draft, target = draft_logits.to(precise), target_logits
    normaliser = draft.logsumexp(-1, keepdim=True)
    gradient = (draft - normaliser).exp_()
    if loss == "cross-entropy":
        best = target.max(-1, keepdim=True).indices
        gradient.scatter_add_(-1, best, gradient.new_full(best.shape, -1))
        return Divergence((normaliser - draft.gather(-1, best))[:, 0], gradient)
    # Σ p (log p − log q) = p·t − lse(t) − p·z + lse(z)
    target = target.to(precise)
    p = target.softmax(-1)
    each = torch.linalg.vecdot(p, target) - torch.linalg.vecdot(p, draft)
    return Divergence(each - target.logsumexp(-1) + normaliser[:, 0], gradient.sub_(p))


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
        kind = weight.device.type
        work = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        head = weight.to(work)
        for rows, target_logits in chunks:
            part = whole_tiles(normed[rows]).to(work)
            logits = F.linear(part, head)[: len(rows)] * scale
            found = divergence(logits, target_logits, loss)
            gradient = whole_tiles(found.gradient.to(work) * scale)
            for_normed[rows] = (gradient @ head)[: len(rows)].to(normed.dtype)
            for_weight += gradient.T @ part
            total += found.each.sum()
            best.append(logits.max(-1).indices)  # several times faster than argmax on a CPU
        ctx.save_for_backward(for_normed, for_weight)
        ids = torch.cat(best)
        ctx.mark_non_differentiable(ids)
        return total, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        for_normed, for_weight = ctx.saved_tensors
        return for_normed * upstream, for_weight * upstream, None, None, None
