"""How far the drafter's distribution is from the target's, over the draft vocabulary.

Shapes: R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.model.padding import pad_rows

LossName = Literal["kl", "cross-entropy"]
# Draft logits (R, V) of hidden states (R, D), given the token ids (R,) before what they predict.
Score = Callable[[Tensor, Tensor], Tensor]


class LossChunk(NamedTuple):
    """A few rows and what the target says there."""

    rows: Tensor  # (R,) of the hidden states
    previous_ids: Tensor  # (R,) the token before each predicted one
    target_logits: Tensor  # (R, V)
    weights: Tensor  # (R,) of the rows in the sum


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
    """Weighted sum of the divergence of the logits that `score` gives for `normed`, a chunk of them
    alive at a time.

    The gradients of a chunk are taken while its logits exist, so that backward only scales them:
    nothing is computed twice, and no logits are kept. Returns (sum, most likely draft ids of the
    chunks' rows in their order).
    """

    @staticmethod
    def forward(  # noqa: PLR0913 (the operands)
        ctx: Any,
        score: Score,
        chunks: Iterable[LossChunk],
        loss: LossName,
        normed: Tensor,  # (E, D)
        *parameters: Tensor,  # that are trained, and that `score` may read
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(normed.dtype, torch.float32)
        total = torch.zeros((), dtype=precise, device=normed.device)
        best = [torch.empty(0, dtype=torch.int64, device=normed.device)]
        for_normed = torch.zeros_like(normed) if ctx.needs_input_grad[3] else None
        for_parameters: list[Tensor | None] = [None] * len(parameters)
        for rows, previous_ids, target_logits, weights in chunks:
            part = pad_rows(normed[rows]).requires_grad_(for_normed is not None)
            with torch.enable_grad():
                logits = score(part, pad_rows(previous_ids))
            found = divergence(logits.detach()[: len(rows)], target_logits, loss)
            upstream = pad_rows(found.gradient.mul_(weights[:, None]).to(logits.dtype))
            operands = [part, *parameters] if for_normed is not None else parameters
            gradients = torch.autograd.grad(logits, operands, upstream, allow_unused=True)
            if for_normed is not None:
                for_normed[rows] = gradients[0][: len(rows)]
                gradients = gradients[1:]
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    known = for_parameters[index]
                    for_parameters[index] = gradient if known is None else known.add_(gradient)
            total += found.each @ weights.to(precise)
            # Several times faster than argmax on a CPU.
            best.append(logits.detach()[: len(rows)].max(-1).indices)
        ctx.gradients = (for_normed, *for_parameters)
        ids = torch.cat(best)
        ctx.mark_non_differentiable(ids)
        return total, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [g if g is None else g.mul_(upstream) for g in ctx.gradients]
        return None, None, None, *scaled
