"""Losses equal torch's own and their definitions, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.train import loss as losses
from peagle.train.loss import ChunkedDivergence, LossChunk, divergence, labels_of


def random_logits(rows: int = 12, vocab: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(rows, vocab, generator=g) * 3 for _ in range(2))
    return draft, target


def compare(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return divergence(draft, labels_of(target))


def test_kl_equals_torch() -> None:
    draft, target = random_logits()
    theirs = F.kl_div(
        draft.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    mine = compare(draft, target)[0]
    torch.testing.assert_close(mine, theirs)
    assert (mine > 0.1).all()


def test_gradient_equals_the_naive_formula_in_float64() -> None:
    draft, target = random_logits()
    mine, naive = compare(draft, target)[1], draft.double().requires_grad_()
    rows = -(target.double().softmax(-1) * naive.log_softmax(-1)).sum(-1)
    rows.sum().backward()
    torch.testing.assert_close(mine.double(), naive.grad, rtol=1e-4, atol=1e-6)


def test_half_precision_is_compared_in_float32() -> None:
    draft, target = (x.bfloat16() for x in random_logits())
    mine = compare(draft, target)[0]
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, compare(draft.float(), target.float())[0])


def test_a_chunk_without_rows_off_the_cpu() -> None:
    """As of a pass that trains nothing."""
    normed, weight = (torch.ones(n, 8, device="meta", requires_grad=True) for n in (20, 30))
    none = torch.empty(0, dtype=torch.int64, device="meta")
    chunk = LossChunk(none, none, torch.empty(0, 30, device="meta"), none.float())
    score = lambda part, _: [part @ weight.T]  # noqa: E731
    total, best = ChunkedDivergence.apply(score, [chunk], normed, weight)
    found = torch.autograd.grad(total, (normed, weight))
    assert (total.shape, best.shape) == ((), (0,))
    assert [gradient.shape for gradient in found] == [(20, 8), (30, 8)]


@pytest.mark.parametrize(("chunk", "block"), [(1, 64), (5, 2), (100, 64), (100, 3)])
@pytest.mark.parametrize("scales", [(0.7,), (0.7, 1.3)])
def test_chunks_equal_the_whole(
    monkeypatch: pytest.MonkeyPatch, chunk: int, block: int, scales: tuple[float]
) -> None:
    """Value and both gradients, some rows left out, under an upstream factor; of several logits of
    one product the mean."""
    monkeypatch.setattr(losses, "BLOCK", block)
    g = torch.Generator().manual_seed(1)
    normed = torch.randn(20, 8, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(30, 8, generator=g, dtype=torch.float64).requires_grad_()
    target = torch.randn(14, 30, generator=g, dtype=torch.float64)
    rows = torch.randperm(20, generator=g)[:14]
    weights = torch.rand(14, generator=g)
    p = target.softmax(-1)
    whole = torch.zeros((), dtype=torch.float64)
    for scale in scales:
        q = (normed[rows] @ weight.T * scale).log_softmax(-1)
        each = (p * (target.log_softmax(-1) - q)).sum(-1)
        whole = whole + (each * weights).sum() / len(scales)
    expected = torch.autograd.grad(whole * 3, (normed, weight))
    split = zip(*(x.split(chunk) for x in (rows, target, weights)), strict=True)
    parts = [LossChunk(some, some, logits, weigh) for some, logits, weigh in split]

    def score(part: Tensor, previous: Tensor) -> list[Tensor]:
        logits = part @ weight.T
        return [logits * scale for scale in scales]

    total, best = ChunkedDivergence.apply(score, parts, normed, weight)
    found = torch.autograd.grad(total * 3, (normed, weight))
    torch.testing.assert_close(total, whole)
    assert torch.equal(best, (normed[rows] @ weight.T).argmax(-1))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
