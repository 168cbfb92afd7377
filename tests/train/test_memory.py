"""The memory of a pass is measured rightly, and the fewest segments that fit are chosen."""

import pytest
import torch
from tiny import METHODS, make_drafter, make_target

from peagle.train.block_attention import BlockAttend
from peagle.train.cod import sample_elements
from peagle.train.memory import (
    MASK_BYTES,
    MAX_SEGMENTS,
    PassCost,
    _kept_for_backward,
    choose_segments,
    pass_bytes,
    pass_cost,
)
from peagle.train.partition import Segment, partition


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
    elements = sample_elements(supervised, documents, 8, 0.8, generator)
    whole = Segment(elements, torch.ones_like(elements.depth, dtype=torch.bool))
    for dense, parallel in ((False, True), (True, True), (True, False)):
        cost = PassCost(1000.0, 50.0, parallel)
        needs = [
            max(sum(pass_bytes(cost, p.elements, documents, dense=dense)) for p in parts)
            for parts in (partition(whole, documents, s) for s in range(1, 9))
        ]
        assert needs == sorted(needs, reverse=True)
        for segments, need in enumerate(needs, start=1):
            chosen = choose_segments(elements, documents, cost, need, dense=dense)
            assert needs[chosen - 1] <= need and chosen <= segments
        assert choose_segments(elements, documents, cost, 0, dense=dense) == MAX_SEGMENTS


def test_entries_of_the_mask() -> None:
    """Somewhat more than the blocks of elements have, and all pairs in a method that runs by
    depth."""
    generator = torch.Generator().manual_seed(0)
    supervised = torch.ones(400, dtype=torch.bool)
    documents = (torch.arange(400) > 120).long()
    elements = sample_elements(supervised, documents, 8, 0.8, generator)
    blocks = BlockAttend(elements, documents, torch.bfloat16).blocks
    made = sum(block.mask.nbytes for block in blocks)
    _, planned = pass_bytes(PassCost(0.0, 0.0, parallel=True), elements, documents, dense=True)
    assert made <= planned < 1.3 * made
    _, planned = pass_bytes(PassCost(0.0, 0.0, parallel=False), elements, documents, dense=True)
    assert planned == MASK_BYTES * len(elements.anchor) ** 2
