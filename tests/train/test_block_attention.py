"""Attention block by block equals attention under the dense mask, in output and gradients."""

from typing import Any

import pytest
import torch
from drawn_elements import CASES, elements_of
from torch import Tensor

from peagle.methods.base import Elements
from peagle.methods.p_eagle import _padded
from peagle.model.attention import AttentionSpec, attention
from peagle.train.attention import BlockAttend, visible
from peagle.train.elements import Segment, partition, sample_elements

SPEC = AttentionSpec(16**-0.5)


def given(rows: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(rows, n, 16, generator=g).to(dtype).requires_grad_() for n in (6, 2, 2)]


def compare(
    elements: Elements,
    documents: Tensor,
    dtype: torch.dtype,
    window: int | None = None,
    **close: float,
) -> None:
    blocked, dense = given(len(elements.anchor), dtype), given(len(elements.anchor), dtype)
    spec = SPEC._replace(window=window)
    found = BlockAttend(elements, documents, dtype, window)(0, *blocked, spec)
    wanted = attention(*dense, visible(elements, documents, window), SPEC)
    torch.testing.assert_close(found, wanted, **close)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad((found * weights).sum(), blocked)
    torch.testing.assert_close(grads, torch.autograd.grad((wanted * weights).sum(), dense), **close)


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize(("tokens", "depths", "seed"), CASES)
def test_equals_dense_attention(tokens: int, depths: int, seed: int, window: int | None) -> None:
    compare(*elements_of(tokens, depths, seed), torch.float64, window, rtol=1e-9, atol=1e-9)


def test_few_heads_at_a_time_equal_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.train.attention.SCORES", 1)
    compare(*elements_of(150, 8, 4), torch.float64, rtol=1e-9, atol=1e-9)


def test_equals_dense_attention_in_bf16() -> None:
    compare(*elements_of(150, 8, 4), torch.bfloat16, rtol=0.05, atol=0.05)


def test_scores_of_bf16_are_not_rounded() -> None:
    """For scores around 100, rounding to bf16 would change every share by up to a quarter."""
    elements, documents = elements_of(150, 8, 4)
    q, k, v = (x.detach() for x in given(len(elements.anchor), torch.bfloat16))
    q, k = q + 20, k + 1.25
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    found = BlockAttend(elements, documents, torch.bfloat16)(0, q, k, v, SPEC)
    assert setting.fp32_precision == before
    exact = attention(q.double(), k.double(), v.double(), visible(elements, documents), SPEC)
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)


def test_rows_that_fill_a_tile_are_harmless() -> None:
    elements, documents = elements_of(150, 6, 4)
    padded, count = _padded(elements), len(elements.anchor)
    attend = BlockAttend(padded, documents, torch.float64)
    q, k, v = given(len(padded.anchor), torch.float64)
    found = attend(0, q, k, v, SPEC)
    assert found.isfinite().all()
    wanted = attention(q[:count], k[:count], v[:count], visible(elements, documents), SPEC)
    torch.testing.assert_close(found[:count], wanted)
    for grad in torch.autograd.grad(found[:count].sum(), (q, k, v)):
        torch.testing.assert_close(grad[count:], torch.zeros_like(grad[count:]))


def test_segments_of_a_sequence() -> None:
    """A segment's context may end before its documents do."""
    elements, documents = elements_of(150, 6, 4)
    whole = Segment(elements, torch.ones_like(elements.depth, dtype=torch.bool))
    for segment in partition(whole, documents, 3):
        compare(segment.elements, documents, torch.float64, rtol=1e-9, atol=1e-9)


def test_gradients_have_the_type_of_what_was_given() -> None:
    elements, documents = elements_of(40, 8, 3)
    q, k, v = given(len(elements.anchor), torch.float32)
    found = BlockAttend(elements, documents, torch.bfloat16)(0, q, k, v, SPEC)
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_masks_and_keys_are_linear_in_elements() -> None:
    """With long documents, too; a block of two documents has a mask of the first one's keys."""

    def kept(tokens: int) -> int:
        documents = (torch.arange(tokens) > tokens // 3).long()
        supervised = torch.ones(tokens, dtype=torch.bool)
        elements = sample_elements(supervised, documents, 4, 0.5, torch.Generator().manual_seed(0))
        blocks = BlockAttend(elements, documents, torch.float32).blocks
        return sum(block.mask.numel() + block.near.numel() for block in blocks)

    assert kept(4000) < 2.5 * kept(2000)
