"""COD's invariants over many shapes, and the example of its docstring."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from peagle.methods.base import Elements
from peagle.train.elements import sample_elements


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shapes() -> Iterator[tuple[Tensor, Tensor, int, float, int]]:
    """Random sequences: tokens, documents, supervision, depths and ratio."""
    for seed in range(90):
        g = generator(seed)
        tokens = int(torch.randint(2, 60, (), generator=g))
        supervised = torch.rand(tokens, generator=g) < torch.rand((), generator=g)
        documents = (torch.rand(tokens, generator=g) < (seed % 3) * 0.08).cumsum(0)
        depths = 1 + seed % 9
        ratio = (0.3, 0.7, 0.8, 1.0)[seed % 4]
        yield supervised, documents, depths, ratio, seed


def by_depth(elements: Elements, depths: int) -> list[list[int]]:
    return [elements.anchor[elements.depth == depth].tolist() for depth in range(depths)]


def candidates(supervised: Tensor, documents: Tensor, depth: int) -> set[int]:
    """Anchors whose predicted token is supervised and in their document, by its definition."""
    tokens = len(supervised)
    return {
        a
        for a in range(tokens - depth - 2)
        if supervised[a + depth + 2] and documents[a] == documents[a + depth + 2]
    }


def test_invariants() -> None:
    for case in shapes():
        check_invariants(*case)


def check_invariants(
    supervised: Tensor, documents: Tensor, depths: int, ratio: float, seed: int
) -> None:
    made, trained = sample_elements(supervised, documents, depths, ratio, generator(seed))
    anchor, depth = made
    assert anchor.dtype == depth.dtype == torch.int64
    right = [candidates(supervised, documents, d) for d in range(depths)]
    pairs = zip(anchor.tolist(), depth.tolist(), strict=True)
    assert trained.tolist() == [a in right[d] for a, d in pairs], "all but context"
    kept = by_depth(made, depths)
    assert sum(map(len, kept)) == len(anchor), "no depth beyond those asked for"
    tokens = len(supervised)
    assert kept[0] == [a for a in range(tokens - 1) if documents[a] == documents[a + 1]], seed
    population = len(candidates(supervised, documents, 0))
    for d in range(1, depths):
        before = candidates(supervised, documents, d - 1) & set(kept[d - 1])
        allowed = candidates(supervised, documents, d) & before
        assert set(kept[d]) <= allowed, "chains closed, supervised, in one document, never negative"
        share = round(ratio**d * population)
        assert len(kept[d]) == min(len(allowed), share), (seed, d)
    order = [(int(d), int(a)) for a, d in zip(anchor, depth, strict=True)]
    assert order == sorted(set(order)), "sorted by depth, then anchor, each once"


def test_ratio_one_keeps_everything() -> None:
    supervised = torch.rand(40, generator=generator(1)) < 0.6
    documents = torch.zeros(40, dtype=torch.int64)
    kept = by_depth(sample_elements(supervised, documents, 6, 1.0, generator(0)).elements, 6)
    for d in range(1, 6):
        before = candidates(supervised, documents, d - 1) & set(kept[d - 1])
        assert set(kept[d]) == candidates(supervised, documents, d) & before
    whole = torch.ones(12, dtype=torch.bool)
    kept = by_depth(sample_elements(whole, documents[:12], 4, 1.0, generator(0)).elements, 4)
    assert kept == [list(range(11)), list(range(9)), list(range(8)), list(range(7))]


def test_same_generator_same_elements() -> None:
    args = torch.ones(50, dtype=torch.bool), torch.zeros(50, dtype=torch.int64), 5, 0.6
    one, same, other = (sample_elements(*args, generator(seed)).elements for seed in (3, 3, 4))
    assert torch.equal(one.anchor, same.anchor) and torch.equal(one.depth, same.depth)
    assert not torch.equal(one.anchor, other.anchor)


def test_every_candidate_has_the_same_chance() -> None:
    supervised, documents = torch.ones(12, dtype=torch.bool), torch.zeros(12, dtype=torch.int64)
    counts = torch.zeros(12)
    for seed in range(2000):
        made = sample_elements(supervised, documents, 2, 0.5, generator(seed)).elements
        counts[made.anchor[made.depth == 1]] += 1
    assert counts[9:].tolist() == [0, 0, 0]
    assert (counts[:9] / 2000 - 5 / 9).abs().max() < 0.05


def test_docstring_example() -> None:
    supervised = torch.arange(8) >= 4
    documents = torch.zeros(8, dtype=torch.int64)
    for seed in range(20):
        made = sample_elements(supervised, documents, 3, 0.5, generator(seed)).elements
        kept = by_depth(made, 3)
        assert kept[0] == [0, 1, 2, 3, 4, 5, 6]
        assert len(kept[1]) == 2 and set(kept[1]) <= {2, 3, 4}
        assert kept[2] in ([a] for a in kept[1] if a <= 3)
        if kept[1] == [2, 4]:
            assert kept[2] == [2]


def test_one_token_is_refused() -> None:
    with pytest.raises(AssertionError, match="two tokens"):
        one = torch.ones(1, dtype=torch.bool)
        sample_elements(one, torch.zeros(1, dtype=torch.int64), 2, 0.5, generator(0))
