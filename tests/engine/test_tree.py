"""Trees hold the likeliest paths, and the target's choices lead along one of them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.tree import Candidate, Draft, along, grow

PLACE = st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4, unique=True).map(
    lambda chances: sorted(chances, reverse=True)
)


@given(st.lists(PLACE, min_size=1, max_size=4), st.integers(1, 12))
def test_no_other_tree_is_likelier(places: list[list[float]], count: int) -> None:
    """Against all paths there are."""
    draft = grow(lambda path: offers(places, path), count)
    every = list[float]()
    for depth in range(1, len(places) + 1):
        for path in product(*places[:depth]):
            every.append(1.0)
            for chance in path:
                every[-1] *= chance
    likeliest = sorted(every, reverse=True)[:count]
    assert draft.chances == pytest.approx(likeliest)
    assert all(parent < row for row, parent in enumerate(draft.parents, start=1))


def offers(places: list[list[float]], path: tuple[int, ...]) -> list[Candidate]:
    own = places[len(path)] if len(path) < len(places) else []
    return [Candidate(token, chance, chance) for token, chance in enumerate(own)]


def test_what_follows_may_depend_on_the_path() -> None:
    after = {(): [Candidate(7, 0.6, 0.6), Candidate(8, 0.4, 0.4)], (8,): [Candidate(9, 1.0, 0.9)]}
    draft = grow(lambda path: after.get(path, []), 8)
    assert (draft.tokens, draft.parents) == ([7, 8, 9], [0, 0, 2])
    assert draft.chances == pytest.approx([0.6, 0.4, 0.36])


def test_the_likeliest_chain_stands_first() -> None:
    draft = grow(lambda path: offers([[0.6, 0.3], [0.7, 0.2], [0.5]], path), 6)
    listed = draft.first(6)
    assert listed.tails()[1:4] == [[1], [1, 2], [1, 2, 3]]
    assert sorted(listed.chances) == sorted(draft.chances)
    assert {path_of(listed, row) for row in range(7)} == {path_of(draft, row) for row in range(7)}
    assert draft.first(1).tokens == [0] and len(draft.first(0)) == 0


def path_of(draft: Draft, row: int) -> tuple[int, ...]:
    return tuple(draft.tokens[at - 1] for at in draft.tails()[row])


def test_the_path_by_hand() -> None:
    draft = Draft([5, 6, 5, 9, 6], [0, 0, 1, 1, 3], [1.0] * 5, [1.0] * 5)
    assert draft.tails() == [[], [1], [2], [1, 3], [1, 4], [1, 3, 5]]
    assert draft.depth == 3 and not draft.is_chain
    assert draft.path([5, 5, 0, 6, 0, 1]) == [1, 3, 5]
    assert draft.path([5, 9, 0, 0, 5, 0]) == [1, 4]
    assert draft.path([6, 9, 5, 0, 0, 0]) == [2]
    assert draft.path([7, 5, 5, 5, 5, 5]) == []


def test_a_chain() -> None:
    chain = grow(along([Candidate(5, 0.9, 0.5), Candidate(5, 0.8, 0.5)]), 9)
    assert chain.is_chain and chain.chances == [0.5, 0.25] and chain.probs == [0.9, 0.8]
    assert Draft().is_chain and Draft().depth == 0 and Draft().tails() == [[]]
