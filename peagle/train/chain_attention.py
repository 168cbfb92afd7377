"""Attention over training elements on the CPU, without the scores of elements that never meet.

Shapes: E elements, C of them of depth 0 (context), E′ deeper, D keys a chain, M key/value heads,
G query heads for each, H head size.

The mask of `train/mask.py` is nearly empty outside of two parts: what a document's elements see of
its context, and the chain of each deeper element, which is a few keys. The first is a call of
torch's flash attention a document, the second a small product. Both are one softmax: each part is
weighed by the sum of its exponentials, whose logarithm (LSE) flash attention returns. Its backward,
given the output and the LSE of both parts together, finds the gradients of its own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec
from peagle.train.mask import chains

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """One document: its elements see its context up to their anchors."""

    rows: Tensor  # (R,) its elements
    context: slice  # of them, those of depth 0
    mask: Tensor  # (R, C) added to scores: 0, or −inf where the context is unseen


class Chains(NamedTuple):
    """The chains of the deeper elements; D keys each, those past its own depth unseen."""

    first: int  # row of the first deeper element
    places: Tensor  # (E′, D) rows of the keys
    unseen: Tensor  # (E′, D) bool


class ChainAttend:
    """Attend of elements, sorted by depth, then anchor, over documents (N,); computes in `dtype`,
    and what is summed over keys in float32."""

    def __init__(self, elements: Elements, documents: Tensor, dtype: torch.dtype) -> None:
        self.chains = _chains(elements)
        self.parts = _parts(elements, documents, self.chains.first, dtype)
        self.dtype = dtype

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert spec.window is None and spec.softcap is None and spec.sinks is None
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        q = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        out: Tensor = _Attention.apply(q, k.transpose(0, 1), v.transpose(0, 1), self, spec.scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def _chains(elements: Elements) -> Chains:
    depth = elements.depth
    first = int((depth == 0).sum())
    unseen = torch.arange(int(depth.max()), device=depth.device) >= depth[first:, None]
    places = torch.zeros_like(unseen, dtype=torch.int64)
    places[~unseen] = chains(elements)[1]  # element by element, in order of depth
    return Chains(first, places, unseen)


def _parts(elements: Elements, documents: Tensor, first: int, dtype: torch.dtype) -> list[Part]:
    anchor = elements.anchor
    owner = documents[anchor]
    ends = torch.searchsorted(anchor[:first], anchor, right=True)  # of the context that each sees
    parts = []
    start = 0
    for count in owner[:first].unique_consecutive(return_counts=True)[1].tolist():
        rows = (owner == owner[start]).nonzero()[:, 0]
        places = torch.arange(start, start + count, device=anchor.device)
        mask = torch.zeros(len(rows), count, dtype=dtype, device=anchor.device)
        mask.masked_fill_(places >= ends[rows, None], float("-inf"))
        parts.append(Part(rows, slice(start, start + count), mask))
        start += count
    return parts


class _Attention(torch.autograd.Function):
    """q (M, G, E, H), k and v (M, E, H) → (M, G, E, H)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attend: ChainAttend, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in attend.parts:
            given = _of_part(q, k, v, part)
            found = flash(*given, 0.0, False, attn_mask=part.mask, scale=scale)
            out[:, :, part.rows], lse[:, :, part.rows] = found
        chains = attend.chains
        with torch.autocast("cpu", enabled=False):
            deeper = slice(chains.first, None)
            scores = _scores(q, k, chains, scale)
            whole = torch.logaddexp(lse[:, :, deeper], scores.logsumexp(-1))
            share = (scores - whole[..., None]).exp()
            mixed = torch.einsum("mged,medh->mgeh", share, v[:, chains.places].to(share.dtype))
            kept = (lse[:, :, deeper] - whole).exp()[..., None] * out[:, :, deeper]
            out[:, :, deeper] = (kept + mixed).to(out.dtype)
            lse[:, :, deeper] = whole
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.attend, ctx.scale = attend, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = saved = ctx.saved_tensors
        grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
        for part in ctx.attend.parts:
            given = _of_part(q, k, v, part)
            ours, all_out, all_lse = (x[:, :, part.rows] for x in (grad, out, lse))
            found = flash_backward(
                ours, *given, all_out, all_lse, 0.0, False, attn_mask=part.mask, scale=ctx.scale
            )
            of_q, of_k, of_v = (x.to(lse.dtype) for x in found)
            grads[0][:, :, part.rows] = of_q
            grads[1][:, part.context] += of_k.sum(1)
            grads[2][:, part.context] += of_v.sum(1)
        _add_chains(grads, grad, saved, ctx.attend.chains, ctx.scale)
        return (*(each.to(q.dtype) for each in grads), None, None)


def _of_part(q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (M, G, R, H), keys and values (M, G, C, H) of a document."""
    groups = q.shape[1]
    keys, values = (x[:, None, part.context].expand(-1, groups, -1, -1) for x in (k, v))
    return q[:, :, part.rows], keys, values


def _scores(q: Tensor, k: Tensor, chains: Chains, scale: float) -> Tensor:
    """(M, G, E′, D) of the deeper elements and their chains, in at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q[:, :, chains.first :].to(dtype), k[:, chains.places].to(dtype)
    scores = torch.einsum("mgeh,medh->mged", queries, keys) * scale
    return scores.masked_fill_(chains.unseen, float("-inf"))


def _add_chains(
    grads: list[Tensor], grad: Tensor, saved: tuple[Tensor, ...], chains: Chains, scale: float
) -> None:
    """Add to the gradients of q, k and v what comes through the chains."""
    q, k, v, out, lse = saved
    deeper = slice(chains.first, None)
    to = lse.dtype
    grad, out = grad[:, :, deeper].to(to), out[:, :, deeper].to(to)
    share = (_scores(q, k, chains, scale) - lse[:, :, deeper, None]).exp()
    of_share = torch.einsum("mgeh,medh->mged", grad, v[:, chains.places].to(to))
    of_scores = share * (of_share - (grad * out).sum(-1, keepdim=True)) * scale
    keys, queries = k[:, chains.places].to(to), q[:, :, deeper].to(to)
    grads[0][:, :, deeper] += torch.einsum("mged,medh->mgeh", of_scores, keys)
    places = chains.places.flatten()
    of_keys = torch.einsum("mged,mgeh->medh", of_scores, queries)
    grads[1].index_add_(1, places, of_keys.flatten(1, 2))
    of_values = torch.einsum("mged,mgeh->medh", share, grad)
    grads[2].index_add_(1, places, of_values.flatten(1, 2))
