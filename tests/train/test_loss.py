"""Losses equal torch's own and their definitions, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.train.loss import ChunkedDivergence, LossChunk, divergence


def random_logits(rows: int = 12, vocab: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(rows, vocab, generator=g) * 3 for _ in range(2))
    return draft, target


def test_kl_equals_torch() -> None:
    draft, target = random_logits()
    theirs = F.kl_div(
        draft.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    mine = divergence(draft, target, "kl").each
    torch.testing.assert_close(mine, theirs)
    assert (mine > 0.1).all()


def test_kl_renormalises_over_the_draft_vocabulary() -> None:
    """Rows are logits of a part of the target's vocabulary: p is conditioned on that part."""
    draft, full = random_logits(vocab=60)
    ids = torch.arange(3, 60, 2)
    p = full.softmax(-1)[:, ids]
    p = p / p.sum(-1, keepdim=True)
    q = draft[:, : len(ids)].softmax(-1)
    by_definition = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(
        divergence(draft[:, : len(ids)], full[:, ids], "kl").each, by_definition
    )


def test_kl_of_equal_distributions_is_zero() -> None:
    _, target = random_logits()
    assert divergence(target + 5, target, "kl").each.abs().max() < 1e-5


@pytest.mark.parametrize("loss", ["kl", "cross-entropy"])
def test_gradient_equals_the_naive_formula_in_float64(loss: str) -> None:
    draft, target = random_logits()
    mine, naive = divergence(draft, target, loss).gradient, draft.double().requires_grad_()
    p = target.double().softmax(-1)
    if loss == "cross-entropy":
        p = F.one_hot(target.argmax(-1), target.shape[1]).double()
    rows = -(p * naive.log_softmax(-1)).sum(-1)
    rows.sum().backward()
    torch.testing.assert_close(mine.double(), naive.grad, rtol=1e-4, atol=1e-6)


def test_cross_entropy_takes_the_best_draft_token() -> None:
    draft, target = random_logits()
    by_definition = -draft.log_softmax(-1)[torch.arange(len(draft)), target.argmax(-1)]
    torch.testing.assert_close(divergence(draft, target, "cross-entropy").each, by_definition)


def test_half_precision_is_judged_in_float32() -> None:
    draft, target = (x.bfloat16() for x in random_logits())
    mine = divergence(draft, target, "kl").each
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, divergence(draft.float(), target.float(), "kl").each)


@pytest.mark.parametrize("loss", ["kl", "cross-entropy"])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunks_equal_the_whole(loss: str, chunk: int) -> None:
    """Value and both gradients, some rows left out, under an upstream factor."""
    g = torch.Generator().manual_seed(1)
    normed = torch.randn(20, 8, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(30, 8, generator=g, dtype=torch.float64).requires_grad_()
    target = torch.randn(14, 30, generator=g, dtype=torch.float64)
    rows = torch.randperm(20, generator=g)[:14]
    weights = torch.rand(14, generator=g)
    logits = normed[rows] @ weight.T * 0.7
    q, p = logits.log_softmax(-1), target.softmax(-1)
    if loss == "kl":
        each = (p * (target.log_softmax(-1) - q)).sum(-1)
    else:
        each = F.nll_loss(q, target.argmax(-1), reduction="none")
    whole = (each * weights).sum()
    expected = torch.autograd.grad(whole * 3, (normed, weight))
    split = zip(*(x.split(chunk) for x in (rows, target, weights)), strict=True)
    parts = [LossChunk(some, some, wanted, weigh) for some, wanted, weigh in split]
    total, best = ChunkedDivergence.apply(
        lambda part, previous: part @ weight.T * 0.7, parts, loss, normed, weight
    )
    found = torch.autograd.grad(total * 3, (normed, weight))
    torch.testing.assert_close(total, whole)
    assert torch.equal(best, logits.argmax(-1))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
