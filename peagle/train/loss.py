"""KL divergence of the drafter's distribution from the target's, over the draft vocabulary.

Shapes: R rows, D drafter hidden, V draft vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.model.tensors import pad_rows, precise

BLOCK = 64  # rows that are compared together on a CPU: their float32 logits stay in its cache

# Draft logits, each (R, V), of hidden states (R, D), given the token ids (R,) before what they
# predict: a head with a correction has them with it and without.
Score = Callable[[Tensor, Tensor], list[Tensor]]


class LossChunk(NamedTuple):
    """A few rows of the hidden states, with the target's logits."""

    rows: Tensor  # (R,) indices of hidden states
    previous_ids: Tensor  # (R,) the token before each predicted one
    target_logits: Tensor  # (R, V)
    weights: Tensor  # (R,) each row's weight in the sum


class Labels(NamedTuple):
    """The target's distribution over the draft vocabulary, in float32 at least."""

    p: Tensor  # (R, V) probabilities
    entropy: Tensor  # (R,) Σ p log p, which is the negative entropy


def labels_of(target_logits: Tensor) -> Labels:
    """The target's distribution, renormalised over the draft vocabulary, by its logits (R, V)."""
    target = target_logits.to(precise(target_logits.dtype))
    p = target.softmax(-1)
    return Labels(p, torch.linalg.vecdot(p, target) - _logsumexp(target, p))


def divergence(draft_logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """KL(labels ‖ draft) of draft logits (R, V), of each row (R,), and the gradient of its sum by
    the logits.

    Written out with its gradient, softmax(draft) − p: autograd reads and writes (R, V) twice as
    often.
    """
    draft = draft_logits.to(precise(draft_logits.dtype))
    q = draft.softmax(-1)
    # Σ p (log p − log q) = Σ p log p − p·z + lse(z)
    each = labels.entropy - torch.linalg.vecdot(labels.p, draft) + _logsumexp(draft, q)
    return each, q.sub_(labels.p)


def _logsumexp(logits: Tensor, probabilities: Tensor) -> Tensor:
    """logsumexp of logits (R, V) by their softmax: torch's own takes as long as all else."""
    return logits.amax(-1) - probabilities.amax(-1).log()


def _weighted(
    chunk: LossChunk, scored: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Weighted sum of a chunk's divergence, a mean over `scored`, and its gradient by each."""
    gradients = [torch.zeros_like(logits) for logits in scored]
    share = chunk.weights.to(dtype) / len(scored)
    total = share.new_zeros(())
    size = BLOCK if share.is_cpu else max(1, len(share))  # rows that are compared together
    for start in range(0, len(share), size):
        block = slice(start, min(start + size, len(share)))
        labels = labels_of(chunk.target_logits[block].to(dtype))
        for logits, gradient in zip(scored, gradients, strict=True):
            each, of_logits = divergence(logits.detach()[block], labels)
            total += each @ share[block]
            gradient[block] = of_logits.mul_(share[block, None])
    return total, gradients


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Sum of gradients; None where a tensor was not read. Changes `one`."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


class ChunkedDivergence(torch.autograd.Function):
    """Weighted sum of the divergence of the logits that `score` gives for `normed`, a chunk of them
    alive at a time. Where it gives several, their mean counts.

    The gradients of a chunk are taken while its logits exist, so that backward only scales them:
    nothing is computed twice, and no logits are kept. Returns (sum, most likely draft ids of the
    chunks' rows in their order, by the first logits).
    """

    @staticmethod
    def forward(  # noqa: PLR0913 (the operands)
        ctx: Any,
        score: Score,
        chunks: Iterable[LossChunk],
        normed: Tensor,  # (E, D)
        *parameters: Tensor,  # that are trained, and that `score` may read
    ) -> tuple[Tensor, Tensor]:
        dtype = precise(normed.dtype)
        total = torch.zeros((), dtype=dtype, device=normed.device)
        best = [torch.empty(0, dtype=torch.int64, device=normed.device)]
        for_normed = torch.zeros_like(normed) if ctx.needs_input_grad[2] else None
        for_parameters: list[Tensor | None] = [None] * len(parameters)
        for chunk in chunks:
            rows = chunk.rows
            part = pad_rows(normed[rows]).requires_grad_(for_normed is not None)
            with torch.enable_grad():
                scored = score(part, pad_rows(chunk.previous_ids))
            loss, upstream = _weighted(chunk, scored, dtype)
            total += loss
            operands = [x for x in (part, *parameters) if x.requires_grad]
            found = list(torch.autograd.grad(scored, operands, upstream, allow_unused=True))
            if for_normed is not None:
                for_normed[rows] = found.pop(0)[: len(rows)]
            for_parameters = [_sum(*pair) for pair in zip(for_parameters, found, strict=True)]
            # Several times faster than argmax on a CPU.
            best.append(scored[0].detach()[: len(rows)].max(-1).indices)
        ctx.gradients = (for_normed, *for_parameters)
        ids = torch.cat(best)
        ctx.mark_non_differentiable(ids)
        return total, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [g if g is None else g.mul_(upstream) for g in ctx.gradients]
        ctx.gradients = None  # else autograd would copy them
        return None, None, *scaled
