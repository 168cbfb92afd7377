"""Filters equal their definitions; whatever is drafted, what comes out has the target's law."""

import itertools
import pickle
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chisquare import BROKEN, CHOOSE, Choose, naive_logits, naive_probabilities, p_value
from refusals import refused
from tiny import chain
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.sampling import (
    NUCLEUS,
    Penalties,
    Sampler,
    accepted_rows,
    greedy,
    target_probabilities,
)
from peagle.engine.tree import Draft

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


def test_nucleus_of_a_large_vocabulary() -> None:
    """The likeliest tokens suffice for some rows, for others the whole vocabulary is sorted."""
    peaked, flat = random_logits(2, 5000, seed=2) * 2, random_logits(2, 5000, seed=3) * 0.01
    params = SamplingParams(temperature=1, top_p=0.9)
    for logits in (peaked, flat, torch.cat([peaked, flat])):
        mine = target_probabilities(logits, params)
        naive = [naive_probabilities(row, params) for row in logits.double().numpy()]
        np.testing.assert_allclose(mine, naive, atol=1e-5)
    assert (target_probabilities(peaked, params) > 0).sum(-1).max() < NUCLEUS
    assert (target_probabilities(flat, params) > 0).sum(-1).min() > NUCLEUS


def test_nucleus_of_a_row_depends_on_no_other_row() -> None:
    """All equal tokens at its edge stay, whether a flat row has the vocabulary sorted or not."""
    peaked = (random_logits(3, 5000, seed=4) * 2).bfloat16().float()  # with many equal ones
    flat = random_logits(1, 5000, seed=5) * 0.01
    for mass in (0.3, 0.6, 0.9):
        params = SamplingParams(temperature=1, top_p=mass)
        together = target_probabilities(torch.cat([peaked, flat]), params)[:3]
        assert torch.equal(target_probabilities(peaked, params), together)
        least = together.masked_fill(together == 0, 1).amin(-1, keepdim=True)
        edge = peaked.gather(1, (together == least).float().argmax(-1, keepdim=True))
        assert (together[peaked == edge] > 0).all()


def judge(chooser: Sampler, logits: Tensor, draft: list[int], choose: Choose = CHOOSE) -> list[int]:
    """The tokens that a round emits."""
    choice = choose(chooser, logits, chain(draft))
    return [choice.tokens[row] for row in (0, *accepted_rows(choice, chain(draft)))]


def sampler(params: SamplingParams, vocabulary: int, seed: int = 0) -> Sampler:
    return Sampler(params, [0], torch.Generator().manual_seed(seed), vocabulary)


@pytest.mark.parametrize(
    ("draft", "emitted"),
    [
        ([], [3]), ([3], [3, 1]), ([2], [3]), ([1], [3]),
        ([3, 1], [3, 1, 4]), ([3, 2], [3, 1]), ([3, 4], [3, 1]), ([2, 1], [3]),
    ],
)  # fmt: skip
def test_greedy_by_hand(draft: list[int], emitted: list[int]) -> None:
    logits = torch.zeros(3, 6)
    logits[[0, 1, 2], [3, 1, 4]] = 1.0
    assert judge(sampler(SamplingParams(), 6), logits[: len(draft) + 1], draft) == emitted


def test_certain_tokens_are_always_accepted_and_impossible_ones_never() -> None:
    logits = torch.full((2, 4), -100.0)
    logits[:, 2] = 0
    for params, draft, emitted in (
        (SamplingParams(temperature=1), [2], [2, 2]),
        (SamplingParams(temperature=5, top_k=1), [1], [2]),
    ):
        chooser = sampler(params, 4)
        for _ in range(300):
            assert judge(chooser, logits, draft) == emitted
            chooser.commit(emitted)


class Chain:
    """A target whose next token depends on the last one; drafts are two likely tokens."""

    def __init__(self, vocab: int = 6) -> None:
        self.table = random_logits(vocab, vocab, seed=4) * 0.5
        self.guess = (self.table + random_logits(vocab, vocab, seed=5) * 0.3).argmax(-1).tolist()

    def law(self, params: SamplingParams, said: list[int]) -> np.ndarray:
        row = self.table[said[-1]].double().numpy()
        return naive_probabilities(naive_logits(row, params, said[:1], said[1:]), params)

    def joint(self, params: SamplingParams) -> np.ndarray:
        first = self.law(params, [0])
        return np.array([p * self.law(params, [0, a]) for a, p in enumerate(first)])

    def pairs(self, choose: Choose, params: SamplingParams, draws: int) -> Counter[tuple[int, int]]:
        """The first two tokens of `draws` generations of two drafted tokens a round."""
        generator, counts = torch.Generator().manual_seed(11), Counter[tuple[int, int]]()
        for _ in range(draws):
            said, chooser = [0], Sampler(params, [0], generator, len(self.table))
            while len(said) < 3:
                first = self.guess[said[-1]]
                draft = [first, self.guess[first]]
                emitted = judge(chooser, self.table[[said[-1], *draft]], draft, choose)
                chooser.commit(emitted)
                said += emitted
            counts[said[1], said[2]] += 1
        return counts


LAWS = [
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=3, min_p=0.05),
    SamplingParams(temperature=0.8, repetition_penalty=1.8),
    SamplingParams(temperature=0.9, presence_penalty=1.2, frequency_penalty=0.7, top_p=0.95),
    SamplingParams(temperature=1.0, logit_bias={1: 1.5, 4: -100.0, 2: -0.5}),
    SamplingParams(
        temperature=0.7, logit_bias={0: 2}, repetition_penalty=0.7, frequency_penalty=1, min_p=0.02
    ),
]


@pytest.mark.parametrize("params", LAWS)
def test_two_positions_have_the_targets_joint_law(params: SamplingParams) -> None:
    target = Chain()
    counts = target.pairs(CHOOSE, params, DRAWS)
    assert p_value(counts, target.joint(params)) > 0.001
    assert len(counts) > 4, "a law worth testing"


@pytest.mark.parametrize("broken", BROKEN)
def test_the_check_notices_wrong_rules(broken: str) -> None:
    target = Chain()
    for params in LAWS[:2]:
        counts = target.pairs(BROKEN[broken], params, DRAWS)
        assert p_value(counts, target.joint(params)) < 1e-6


def test_the_check_notices_penalties_that_forget_the_draft(monkeypatch) -> None:  # noqa: ANN001
    target, params = Chain(), SamplingParams(temperature=0.8, frequency_penalty=2)
    target.guess = [1] * 6  # likely, and again within a draft
    assert p_value(target.pairs(CHOOSE, params, DRAWS), target.joint(params)) > 0.001
    apply = Penalties.apply
    monkeypatch.setattr(Penalties, "apply", lambda self, rows, draft: apply(self, rows, Draft()))
    assert p_value(target.pairs(CHOOSE, params, DRAWS), target.joint(params)) < 1e-6


EVERYTHING = SamplingParams(
    logit_bias={3: 1.5, 7: -2}, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
)


def test_each_row_is_what_the_tokens_before_it_make_it() -> None:
    """The grammar's mask comes last."""
    prompt, output, draft = [1, 3, 3, 5], [5, 6, 7, 7], [3, 8, 8, 7, 1]
    logits = random_logits(len(draft) + 1, 12, seed=6)
    masks = random_logits(len(draft) + 1, 12, seed=7) > 0
    matcher: Any = SimpleNamespace(masks=lambda _: masks, advance=lambda _: None)
    chooser = Sampler(EVERYTHING, prompt, torch.Generator(), 12, matcher)
    chooser.commit(output[:1])
    chooser.commit(output[1:])
    mine = chooser._rows(logits, chain(draft)).double().numpy()
    for i, row in enumerate(logits.double().numpy()):
        allowed = masks[i].nonzero()[:, 0].tolist()
        naive = naive_logits(row, EVERYTHING, prompt, output + draft[:i], allowed)
        np.testing.assert_allclose(mine[i], naive, atol=1e-5)


def test_a_request_keeps_no_vector_of_its_vocabulary() -> None:
    """Thousands may wait, or have ended and be kept for their answers."""
    prompt, output, draft, size = [1, 3, 3], [7, 7, 2], [3], 20_000
    chooser = Sampler(EVERYTHING, prompt, torch.Generator(), size)
    logits = random_logits(2, size, seed=12)
    for token in output:
        chooser._rows(logits, chain(draft))
        chooser.commit([token])
    mine = chooser._rows(logits, chain(draft)).double().numpy()
    for i, row in enumerate(logits.double().numpy()):
        naive = naive_logits(row, EVERYTHING, prompt, output + draft[:i])
        np.testing.assert_allclose(mine[i], naive, atol=1e-5)
    assert len(pickle.dumps(chooser._penalties)) < size


def test_repetition_is_as_in_transformers() -> None:
    logits, prompt, output = random_logits(1, 12, seed=6), [1, 3, 5], [5, 6]
    chooser = Sampler(SamplingParams(repetition_penalty=1.4), prompt, torch.Generator(), 12)
    chooser.commit(output)
    theirs = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(chooser._rows(logits, Draft()), theirs)


@pytest.mark.parametrize("params", [EVERYTHING, replace(EVERYTHING, temperature=0.8, seed=1)])
def test_rows_do_not_depend_on_the_rows_behind_them(params: SamplingParams) -> None:
    logits, draft = random_logits(5, 30, seed=8), [4, 9, 4, 2]
    rows = sampler(params, 30)._rows(logits, chain(draft))
    for length in range(5):
        fewer = sampler(params, 30)._rows(logits[: length + 1], chain(draft[:length]))
        assert torch.equal(fewer, rows[: length + 1])


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("count", [0, 3, 99])
def test_logprobs_are_a_plain_log_softmax(temperature: float, count: int) -> None:
    """Log-probabilities come from the raw logits, whatever the sampling parameters are."""
    params = replace(EVERYTHING, temperature=temperature, logprobs=count)
    logits = random_logits(4, 30, seed=9).bfloat16()
    expected = torch.log_softmax(logits.double(), -1)
    best = sampler(replace(params, temperature=0), 30)._rows(logits, chain([0, 0, 0])).argmax(-1)
    chooser = sampler(params, 30)
    emitted = judge(chooser, logits, [int(best[0]), 0, 0])
    logprobs = chooser.logprobs(logits, list(range(len(emitted))), emitted)
    assert [entry.token for entry in logprobs] == emitted
    for entry, row in zip(logprobs, expected, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-5)
        tokens, values = zip(*entry.top, strict=True) if entry.top else ((), ())
        assert list(values) == pytest.approx(row[list(tokens)].tolist(), abs=1e-5)
        assert list(values) == pytest.approx(row.topk(min(count, 30)).values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=1e-6, top_p=0.5, stop_token_ids=(3,)), True),
        (SamplingParams(temperature=0.5), False),
        (SamplingParams(logprobs=0), True),
        (SamplingParams(logit_bias={1: 1}), False),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(presence_penalty=0.1), False),
        (SamplingParams(frequency_penalty=0.1), False),
    ],
)
def test_plain(params: SamplingParams, plain: bool) -> None:
    """Then the argmax of all requests' logits may be taken at once."""
    chooser, logits = sampler(params, 6), random_logits(3, 6, seed=10)
    assert chooser.plain == plain
    if plain:
        assert chooser.choose(logits, chain([1, 2])) == greedy(logits)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_fail_one_request(temperature: float, bad: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0)
    logits = torch.zeros(2, 5)
    logits[0, 3] = 200
    logits[1] = bad
    with pytest.raises(RequestFailure, match="NaN or infinite"):
        judge(sampler(params, 5), logits[1:], [])
    assert judge(sampler(params, 5), logits, [3]) == [3], "the next round fails, as without drafts"
    logits[0, 1] = float("-inf")  # a token the target never says
    assert judge(sampler(params, 5), logits[:1], []) == [3]
    assert judge(sampler(params, 5), logits, [2]) == [3], "a row that is never read"


@pytest.mark.parametrize("filters", [{"top_p": 5e-324}, {"min_p": 1.0}, {"top_k": 1}])
def test_the_narrowest_filters_leave_the_likeliest(filters: dict[str, float]) -> None:
    """Also a mass that is no float32 above 0: nothing would be left, and no token drawn."""
    logits = random_logits(3, 20)
    rows = target_probabilities(logits, SamplingParams(temperature=1, **filters))  # type: ignore[arg-type]
    assert torch.equal(rows, torch.nn.functional.one_hot(logits.argmax(-1), 20).float())


@pytest.mark.parametrize(("field", "ids"), [("logit_bias", {2: 1, 6: 1}), ("stop_token_ids", (6,))])
def test_tokens_the_target_does_not_have(field: str, ids: Any) -> None:
    with refused(field) as found:
        sampler(SamplingParams(**{field: ids}), 6)
    assert found.value.value == 6
