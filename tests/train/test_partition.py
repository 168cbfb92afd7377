"""Partitioned training is the flat one: the same elements once, the same gradient to rounding."""

from collections.abc import Iterator
from itertools import compress

import pytest
import torch
from tiny import METHODS, make_drafter, make_target
from torch import Tensor

from peagle.methods.base import Elements
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.batches import PackedDocuments
from peagle.train.elements import Segment, partition, sample_elements
from peagle.train.passes import run_target
from peagle.train.trainee import Trainee

pytestmark = pytest.mark.usefixtures("unrounded")


def sampled(tokens: int, depths: int, ratio: float, documents: Tensor, seed: int) -> Elements:
    g = torch.Generator().manual_seed(seed)
    supervised = torch.rand(tokens, generator=g) < 0.8
    return sample_elements(supervised, documents, depths, ratio, g).elements


def cases() -> Iterator[tuple[Elements, Tensor, int]]:
    for seed in range(60):
        tokens, segments = 5 + 7 * (seed % 9), 1 + seed % 6
        documents = (torch.arange(tokens) // (tokens // (1 + seed % 3) + 1)).long()
        ratio = (0.5, 0.8, 1.0)[seed % 3]
        yield sampled(tokens, 1 + seed % 8, ratio, documents, seed), documents, segments


def pairs(elements: Elements) -> list[tuple[int, int]]:
    return list(zip(elements.anchor.tolist(), elements.depth.tolist(), strict=True))


def test_invariants() -> None:
    for case in cases():
        check_invariants(*case)


def check_invariants(elements: Elements, documents: Tensor, segments: int) -> None:
    every = Segment(elements, torch.ones_like(elements.depth, dtype=torch.bool))
    parts, everything = partition(every, documents, segments), set(pairs(elements))
    document = documents.tolist()
    owned = list[tuple[int, int]]()
    for part in parts:
        owned += compress(pairs(part.elements), part.trained)
    assert sorted(owned) == sorted(pairs(elements)), "every element is trained exactly once"
    for part in parts:
        inside = pairs(part.elements)
        assert [(d, a) for a, d in inside] == sorted((d, a) for a, d in inside), "order is kept"
        own = set(compress(inside, part.trained))
        assert own, "no pass for nothing"
        here = set(inside)
        for a, d in own:
            chain = {(a, below) for below in range(d)}
            context = {(b, 0) for b in range(a + 1) if document[b] == document[a]}
            assert chain | (context & everything) <= here, "all it attends to is there"
            assert chain <= own, "a chain is in one pass"
        assert all(d == 0 for a, d in here - own), "context is depth 0 only"


def test_the_example_of_the_docstring() -> None:
    zeros = torch.zeros(6, dtype=torch.int64)
    whole = sample_elements(zeros == 0, zeros, 3, 1.0, torch.Generator().manual_seed(0))
    first, second = partition(whole, zeros, 2)
    owned = [
        [p for p, own in zip(pairs(part.elements), part.trained, strict=True) if own]
        for part in (first, second)
    ]
    assert owned[0] == [(a, d) for d in range(3) for a in (0, 1, 2) if a + d < 4]
    assert owned[1] == [(3, 0)]
    assert set(pairs(second.elements)) - set(owned[1]) == {(0, 0), (1, 0), (2, 0), (4, 0)}


def gradients(
    drafter: Drafter, target: Target, sequence: PackedDocuments, parts: list[Segment]
) -> tuple[dict[str, Tensor], float, list[int]]:
    trainee, loss = Trainee(drafter, target, 0.9), 0.0
    hits = torch.zeros(2, 9, dtype=torch.int64)
    drafter.zero_grad()
    output = run_target(target, sequence, drafter.config.feature_layers)
    for segment in parts:
        result = trainee(sequence, output, segment)
        result.loss.backward()
        loss += float(result.loss.detach())
        hits[:, : len(result.correct)] += torch.stack([result.correct, result.supervised])
    return {n: p.grad.clone() for n, p in drafter.named_parameters()}, loss, hits.flatten().tolist()


@pytest.fixture(scope="module")
def target() -> Target:
    """In float64, so that what is left of a difference is an error."""
    made = make_target(seed=2, spread=0.3, context=512)
    made.model.double()
    made.dtype = torch.float64
    return made


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("documents", "tokens", "depths", "ratio", "segments"),
    [
        (1, 40, 3, 1.0, 2),
        (3, 90, 5, 0.7, 3),
        (1, 150, 8, 0.8, 7),
        (3, 61, 8, 0.8, 61),
        (3, 33, 1, 0.8, 4),
    ],
)
def test_the_gradient_is_the_flat_one(  # noqa: PLR0913, PLR0917
    target: Target, method: str, documents: int, tokens: int, depths: int, ratio: float,
    segments: int,
) -> None:  # fmt: skip
    drafter = make_drafter(target, method).double()
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(5, 128, (tokens,), generator=g)
    owner = torch.arange(tokens) * documents // tokens
    supervised = (torch.rand(tokens, generator=g) < 0.7) & (ids >= 32)  # the draft vocabulary
    sequence = PackedDocuments(ids, supervised, owner)
    whole = sample_elements(supervised, owner, depths, ratio, g)
    flat, loss, hits = gradients(drafter, target, sequence, [whole])
    parts = partition(whole, owner, segments)
    assert len(parts) > 1
    split, split_loss, split_hits = gradients(drafter, target, sequence, parts)
    assert split_loss == pytest.approx(loss, rel=1e-12) and split_hits == hits
    for name, gradient in flat.items():
        error = (split[name] - gradient).norm() / gradient.norm().clamp(min=1e-30)
        assert error < 1e-9, name
    assert sum(float(gradient.norm()) for gradient in flat.values()) > 1e-3


def test_packed_documents_equal_single_ones(target: Target) -> None:
    """The gradient of a packed sequence is the sum over its documents."""
    drafter = make_drafter(target, "p-eagle").double()
    g = torch.Generator().manual_seed(3)
    ids, owner = torch.randint(5, 128, (60,), generator=g), (torch.arange(60) >= 25).long()
    sequence = PackedDocuments(ids, torch.ones(60, dtype=torch.bool), owner)
    whole = sample_elements(*sequence[1:], 4, 1.0, g)
    packed, loss, _ = gradients(drafter, target, sequence, [whole])
    total, parts = {name: torch.zeros_like(t) for name, t in packed.items()}, 0.0
    for part in (slice(0, 25), slice(25, 60)):
        alone = PackedDocuments(*(x[part] for x in sequence))
        own = sample_elements(*alone[1:], 4, 1.0, g)
        single = gradients(drafter, target, alone, [own])
        parts += single[1]
        total = {name: t + single[0][name] for name, t in total.items()}
    assert parts == pytest.approx(loss, rel=1e-9)
    for name, gradient in packed.items():
        assert (gradient - total[name]).norm() <= 1e-9 * gradient.norm(), name
