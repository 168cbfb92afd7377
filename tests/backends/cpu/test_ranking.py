"""Native ranking of logits gives what torch gives."""

import pytest
import torch

from peagle.backends.choose import choose_backend
from peagle.backends.cpu.ranking import CpuRanking
from peagle.backends.ranking import Ranking, ranking

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (1, 7), (3, 128), (2, 129), (13, 49_152)]


def logits(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Bfloat16 has many equal numbers among 49,152."""
    generator = torch.Generator().manual_seed(rows + width)
    return (4 * torch.randn(rows, width, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_are_torchs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = logits(*shape, dtype)
    largest, ids = CpuRanking().best(given)
    expected, at = Ranking().best(given)
    assert torch.equal(largest, expected.float()) and torch.equal(ids, at)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_likeliest_are_torchs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = logits(*shape, dtype)
    count = min(16, shape[1])
    probs, ids = CpuRanking().likeliest(given, count)
    expected, _ = Ranking().likeliest(given, count)
    assert torch.allclose(probs, expected, rtol=1e-5, atol=1e-8)
    assert torch.equal(given.gather(-1, ids), given.topk(count).values), "in this order"
    assert all(len(set(row)) == count for row in ids.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_ones_the_first_comes_first(dtype: torch.dtype) -> None:
    given = torch.zeros(2, 300, dtype=dtype)
    given[0, [140, 299, 7]] = 2.0
    assert CpuRanking().best(given)[1].tolist() == [7, 0]
    assert CpuRanking().likeliest(given, 5)[1].tolist() == [[7, 140, 299, 0, 1], [0, 1, 2, 3, 4]]


def test_numbers_that_are_none_are_told() -> None:
    given = torch.zeros(4, 300)
    given[0, 250] = float("nan")
    given[1, 3] = float("inf")
    given[2] = float("-inf")
    assert CpuRanking().best(given)[0].isfinite().tolist() == [False, False, False, True]


def test_what_is_masked_has_no_chance() -> None:
    given = torch.full((1, 300), float("-inf"))
    given[0, [5, 200]] = torch.tensor([1.0, 2.0])
    probs, ids = CpuRanking().likeliest(given, 4)
    assert ids[0, :2].tolist() == [200, 5]
    assert torch.allclose(probs[0], torch.tensor([0.7310586, 0.2689414, 0.0, 0.0]))
    assert (probs[0, 2:] == 0).all(), "exactly"


def test_each_dtype_has_its_ranking() -> None:
    choose_backend(torch.device("cpu"), torch.float32)
    assert all(isinstance(ranking(torch.zeros(1, 2, dtype=each)), CpuRanking) for each in DTYPES)
    assert type(ranking(torch.zeros(1, 2, dtype=torch.float64))) is Ranking
