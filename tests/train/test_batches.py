"""Documents of a step: each once an epoch, packed without loss, the same in any process."""

import pytest

from peagle.data.example import Example
from peagle.train.batches import Batches

DATA = [Example([100 + i] * (3 + i % 5), [False] + [True] * (2 + i % 5)) for i in range(23)]


def documents(batches: Batches, numbers: range) -> list[list[int]]:
    """Numbers of the documents of each sequence."""
    found = []
    for number in numbers:
        sequence = batches.sequence(number)
        owners = sequence.numbers
        assert sequence.ids.tolist() == [token for n in owners for token in DATA[n].ids]
        assert owners == sorted(owners)
        found.append(owners)
    return found


@pytest.mark.parametrize("pack", [None, 7, 20])
def test_every_document_once_an_epoch(pack: int | None) -> None:
    batches = Batches(DATA, batch=1, pack=pack, seed=0)
    first, both = batches.sequences(1), batches.sequences(2)
    epochs = [documents(batches, range(first)), documents(batches, range(first, both))]
    flat = [[i for sequence in epoch for i in sequence] for epoch in epochs]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(len(DATA)))
    assert flat[0] != flat[1], "in another order"


def test_packing_fills_and_never_cuts() -> None:
    batches = Batches(DATA, batch=1, pack=20, seed=0)
    lengths = [len(batches.sequence(n).ids) for n in range(batches.sequences(1))]
    assert sum(lengths) == sum(len(e.ids) for e in DATA)
    assert max(lengths) <= 20 and sorted(lengths)[1] > 12
    longer = Batches([Example([1] * 30, [True] * 30), *DATA], batch=1, pack=20, seed=0)
    assert 30 in [len(longer.sequence(n).ids) for n in range(longer.sequences(1))]


def test_any_order_of_asking_gives_the_same() -> None:
    one, other = (Batches(DATA, batch=4, pack=20, seed=3) for _ in range(2))
    numbers = [n for step in (0, 1, 5, 11) for n in one.numbers(step)]
    forward = {n: one.sequence(n).ids.tolist() for n in numbers}
    assert forward == {n: other.sequence(n).ids.tolist() for n in reversed(numbers)}


@pytest.mark.parametrize("seed", [2**40 - 1, 1 - 2**40])
def test_the_largest_seeds(seed: int) -> None:
    batches = Batches(DATA, batch=1, pack=None, seed=seed)
    assert len(documents(batches, range(batches.sequences(1)))) == len(DATA)
