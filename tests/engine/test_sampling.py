"""Filters equal their definitions; whatever is drafted, what comes out has the target's law."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from chisquare import BROKEN, Verify, naive_probabilities, p_value
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from peagle.engine.request import SamplingParams
from peagle.engine.sampling import target_probabilities, verify

FILTERS = [
    SamplingParams(temperature=t, top_p=top_p, top_k=top_k, min_p=min_p)
    for t, top_p, top_k, min_p in itertools.product(
        (0.3, 1.0, 1.7), (1.0, 0.9, 0.3), (0, 1, 5, 999), (0.0, 0.1, 0.6)
    )
]


DRAWS = 4000  # enough for the wrong rules to be noticed


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5


def test_filters_equal_transformers() -> None:
    """In vLLM's order: min-p, top-k, top-p, after temperature."""
    logits = random_logits(20, 50)
    for params in FILTERS:
        mine = target_probabilities(logits, params)
        theirs = logits / params.temperature
        if params.min_p:
            theirs = MinPLogitsWarper(params.min_p)(None, theirs)
        if params.top_k:
            theirs = TopKLogitsWarper(params.top_k)(None, theirs)
        if params.top_p < 1:
            theirs = TopPLogitsWarper(params.top_p)(None, theirs)
        torch.testing.assert_close(mine, theirs.softmax(-1), msg=str(params))
        assert torch.equal(mine > 0, theirs.isfinite()), params


def test_filters_equal_their_definition() -> None:
    logits = random_logits(10, 30, seed=1)
    for params in FILTERS:
        naive = [naive_probabilities(row, params) for row in logits.double().numpy()]
        mine = target_probabilities(logits, params)
        np.testing.assert_allclose(mine, naive, atol=1e-6, err_msg=str(params))


def test_order_of_filters() -> None:
    """top-p is over what top-k left: 0.4 of 0.4 + 0.3 is more than half, so 0.3 goes too."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    params = SamplingParams(temperature=1, top_k=2, top_p=0.5)
    assert target_probabilities(logits, params).tolist() == [[1, 0, 0, 0]]


def test_half_precision_logits_are_judged_in_float32() -> None:
    logits = random_logits(2, 40).bfloat16()
    mine = target_probabilities(logits, SamplingParams(temperature=1))
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, logits.float().softmax(-1))


@pytest.mark.parametrize(
    ("draft", "accepted", "token"),
    [([], 0, 3), ([3], 1, 1), ([2], 0, 3), ([3, 1], 2, 4), ([3, 2], 1, 1), ([2, 1], 0, 3)],
)
def test_greedy_by_hand(draft: list[int], accepted: int, token: int) -> None:
    logits = torch.zeros(3, 6)
    logits[[0, 1, 2], [3, 1, 4]] = 1.0
    verdict = verify(logits[: len(draft) + 1], draft, SamplingParams(), torch.Generator())
    assert verdict == (accepted, token)


def test_certain_tokens_are_always_accepted_and_impossible_ones_never() -> None:
    logits = torch.full((2, 4), -100.0)
    logits[:, 2] = 0
    params, generator = SamplingParams(temperature=1), torch.Generator().manual_seed(0)
    assert {verify(logits, [2], params, generator) for _ in range(300)} == {(1, 2)}
    top = SamplingParams(temperature=5, top_k=1)
    assert {verify(logits, [1], top, generator) for _ in range(300)} == {(0, 2)}


class Chain:
    """A target whose next token depends on the last one; drafts are two likely tokens."""

    def __init__(self, vocab: int = 6) -> None:
        self.table = random_logits(vocab, vocab, seed=4) * 0.5
        self.guess = (self.table + random_logits(vocab, vocab, seed=5) * 0.3).argmax(-1).tolist()

    def joint(self, params: SamplingParams, start: int = 0) -> np.ndarray:
        rows = np.array([naive_probabilities(r, params) for r in self.table.double().numpy()])
        return rows[start][:, None] * rows

    def pairs(self, judge: Verify, params: SamplingParams, draws: int) -> Counter[tuple[int, int]]:
        """The first two tokens of `draws` generations of two drafted tokens a round."""
        generator, counts = torch.Generator().manual_seed(11), Counter[tuple[int, int]]()
        for _ in range(draws):
            said = [0]
            while len(said) < 3:
                first = self.guess[said[-1]]
                draft = [first, self.guess[first]]
                rows = self.table[[said[-1], *draft]]
                accepted, token = judge(rows, draft, params, generator)
                said += [*draft[:accepted], token]
            counts[said[1], said[2]] += 1
        return counts


LAWS = [
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=3, min_p=0.05),
]


@pytest.mark.parametrize("params", LAWS)
def test_two_positions_have_the_targets_joint_law(params: SamplingParams) -> None:
    chain = Chain()
    counts = chain.pairs(verify, params, DRAWS)
    assert p_value(counts, chain.joint(params)) > 0.001
    assert len(counts) > 4, "a law worth testing"


@pytest.mark.parametrize("broken", BROKEN)
def test_the_check_notices_wrong_rules(broken: str) -> None:
    chain = Chain()
    for params in LAWS[:2]:
        counts = chain.pairs(BROKEN[broken], params, DRAWS)
        assert p_value(counts, chain.joint(params)) < 1e-6
