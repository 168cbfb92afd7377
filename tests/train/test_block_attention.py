"""Attention block by block equals attention under the dense mask, in output and gradients, whether
all elements run in one forward or each depth in its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn_elements import CASES, by_depth, elements_of, visible
from largest_tensor import Largest
from tiny import METHODS, make_drafter, make_target
from torch import Tensor

from peagle.methods.base import Elements
from peagle.model.attention import AttentionSpec, attention
from peagle.model.tensors import pad_rows
from peagle.train.attention import BlockStep, in_tiles
from peagle.train.batches import PackedDocuments
from peagle.train.elements import Segment, partition, sample_elements
from peagle.train.passes import _attend, run_drafter
from peagle.train.processes import rebuilt

SPEC = AttentionSpec(16**-0.5)
STEPS: list[Callable[[Elements], list[int]]] = [lambda elements: [len(elements.anchor)], by_depth]


def given(rows: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(rows, n, 16, generator=g).to(dtype).requires_grad_() for n in (6, 2, 2)]


def blockwise(
    elements: Elements, documents: Tensor, qkv: list[Tensor], counts: list[int],
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of `qkv` in forwards of these counts, each filled up to a tile."""
    attend = _attend(elements, documents, window, counts)
    spec = SPEC._replace(window=window)
    parts = zip(*(x.split(counts) for x in qkv), strict=True)
    return torch.cat([attend(0, *map(pad_rows, part), spec)[: len(part[0])] for part in parts])


def compare(
    elements: Elements,
    documents: Tensor,
    dtype: torch.dtype,
    window: int | None = None,
    **close: float,
) -> None:
    dense = given(len(elements.anchor), dtype)
    wanted = attention(*dense, visible(elements, documents, window), SPEC)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad((wanted * weights).sum(), dense)
    for counts in STEPS:
        blocked = given(len(elements.anchor), dtype)
        found = blockwise(elements, documents, blocked, counts(elements), window)
        torch.testing.assert_close(found, wanted, **close)
        grads = torch.autograd.grad((found * weights).sum(), blocked)
        torch.testing.assert_close(grads, gradients, **close)


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
    found = blockwise(elements, documents, [q, k, v], [len(q)])
    assert setting.fp32_precision == before
    exact = attention(q.double(), k.double(), v.double(), visible(elements, documents), SPEC)
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("counts", STEPS)
def test_rows_that_fill_a_tile_are_harmless(counts: Callable[[Elements], list[int]]) -> None:
    elements, documents = elements_of(150, 6, 4)
    attend = _attend(elements, documents, None, counts(elements))
    for count in counts(elements):
        q, k, v = given(len(pad_rows(torch.zeros(count))), torch.float64)
        found = attend(0, q, k, v, SPEC)
        assert found.isfinite().all()
        for grad in torch.autograd.grad(found[:count].sum(), (q, k, v)):
            torch.testing.assert_close(grad[count:], torch.zeros_like(grad[count:]))


def test_segments_of_a_sequence() -> None:
    """A segment's context may end before its documents do."""
    elements, documents = elements_of(150, 6, 4)
    whole = Segment(elements, torch.ones_like(elements.depth, dtype=torch.bool))
    for segment in partition(whole, documents, 3):
        compare(segment.elements, documents, torch.float64, rtol=1e-9, atol=1e-9)


def test_gradients_have_the_type_of_what_was_given() -> None:
    """Under autocast queries and keys may be float32, and values are bf16."""
    elements, documents = elements_of(40, 8, 3)
    q, k, v = given(len(elements.anchor), torch.float32)
    for counts in STEPS:
        found = blockwise(elements, documents, [q, k, v.bfloat16()], counts(elements))
        assert found.dtype == torch.bfloat16
        for grad in torch.autograd.grad(found.sum(), (q, k)):
            assert grad.dtype == torch.float32


def long_document(tokens: int) -> tuple[Elements, Tensor, Tensor]:
    """Elements, documents, and which tokens are trained; the second document is the longer one."""
    documents = (torch.arange(tokens) > tokens // 3).long()
    supervised = torch.ones(tokens, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    elements = sample_elements(supervised, documents, 4, 0.5, generator).elements
    return elements, documents, supervised


def test_masks_and_keys_are_linear_in_elements() -> None:
    """With long documents, too; a block of two documents has a mask of the first one's keys."""

    def kept(tokens: int) -> int:
        elements, documents, _ = long_document(tokens)
        tiled, [step] = in_tiles(elements, [len(elements.anchor)])
        blocks = BlockStep(tiled, documents, step).blocks
        return sum(block.mask.numel() + block.near.numel() for block in blocks)

    assert kept(4000) < 2.5 * kept(2000)


@contextmanager
def small_scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Largest]:
    """A head at a time: scores are of one block, so as many as a block's keys."""
    monkeypatch.setattr("peagle.train.attention.SCORES", 1)
    with Largest() as largest:
        yield largest


@pytest.mark.parametrize("window", [None, 1280])
@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_of_a_pass_grows_with_the_square_of_the_length(
    method: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of all pairs would be four times as large for twice the length. With a window the
    scores of a block do not grow, but activations do."""
    drafter = make_drafter(make_target(), method)
    sizes = replace(drafter.config.transformer, sliding_window=window)
    config = replace(drafter.config, transformer=sizes)
    drafter = rebuilt(drafter, config, drafter.state_dict())

    def largest(tokens: int) -> int:
        elements, documents, supervised = long_document(tokens)
        sequence = PackedDocuments(torch.zeros(tokens, dtype=torch.int64), supervised, documents)
        features = torch.zeros(tokens, drafter.config.feature_width)
        with small_scores(monkeypatch) as seen:
            run_drafter(drafter, sequence, features, elements).sum().backward()
        return seen.size

    first, second = largest(1500), largest(3000)
    assert second < 2.2 * first and second < 3000**2, (first, second)
