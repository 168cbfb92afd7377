"""The memory of a pass is measured rightly, and the fewest segments that fit are chosen."""

import pytest
import torch
from tiny import METHODS, make_drafter, make_target

from peagle.train.elements import partition, sample_elements
from peagle.train.sampler import (
    MAX_SEGMENTS,
    PassCost,
    _kept_for_backward,
    choose_segments,
    pass_cost,
)


@pytest.mark.parametrize("method", METHODS)
def test_cost_is_linear_in_elements(method: str) -> None:
    drafter = make_drafter(make_target(), method)
    cost = pass_cost(drafter)
    for tokens in (128, 320, 640):  # multiples of the row tile
        kept = _kept_for_backward(drafter, tokens, bf16=True)
        assert kept == pytest.approx(cost.fixed + cost.element * (tokens - 1), rel=0.05)
    assert pass_cost(drafter, bf16=False).element > 1.2 * cost.element


def test_more_layers_keep_more() -> None:
    target = make_target()
    one, four = (pass_cost(make_drafter(target, "p-eagle", layers=n)) for n in (1, 4))
    assert 2 < four.element / one.element < 4


def test_fewest_segments_that_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    supervised, documents = torch.ones(300, dtype=torch.bool), torch.zeros(300, dtype=torch.int64)
    whole = sample_elements(supervised, documents, 8, 0.8, generator)
    cost = PassCost(1000.0, 50.0)
    needs = [
        max(cost.of(len(p.trained)) for p in parts)
        for parts in (partition(whole, documents, s) for s in range(1, 9))
    ]
    assert needs == sorted(needs, reverse=True)
    for segments, need in enumerate(needs, start=1):
        chosen = choose_segments(whole, documents, cost, need)
        assert needs[chosen - 1] <= need and chosen <= segments
    assert choose_segments(whole, documents, cost, 0) == MAX_SEGMENTS
