"""Sampling parameters are checked; statistics count as vLLM does."""

from unittest.mock import Mock

import pytest
from refusals import refused
from tiny import chain

from peagle.engine.params import SamplingParams
from peagle.engine.request import Request, Stats
from peagle.engine.tree import Draft


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, float("nan"), 1e300)),
        ("top_p", (0.0, 1.1)),
        ("top_k", (-1,)),
        ("min_p", (-0.1, 1.5)),
        ("max_tokens", (0,)),
        ("repetition_penalty", (0.0, float("nan"), float("inf"), 5e-324)),
        ("presence_penalty", (2.1, float("nan"))),
        ("frequency_penalty", (-2.1,)),
        ("logprobs", (-1,)),
        ("n", (0,)),
        ("seed", (2**63, -(2**63))),
    ],
)
def test_bad_parameters(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with refused(name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop": ("a", "")}, "stop"),
        ({"stop": "the end"}, "stop"),
        ({"logit_bias": {7: 101}}, "logit_bias"),
        ({"logit_bias": {7: float("nan")}}, "logit_bias"),
        ({"n": 3}, "n"),
        ({"regex": ""}, "regex"),
        ({"grammar": ""}, "grammar"),
        ({"regex": "a", "json_schema": {}}, "json_schema"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": "{oops"}, "json_schema"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema"),
        ({"json_schema": "[1]"}, "json_schema"),
    ],
)
def test_what_does_not_go_together(given: dict[str, object], field: str) -> None:
    with refused(field):
        SamplingParams(**given)


def test_constraint() -> None:
    assert SamplingParams().constraint is None
    assert SamplingParams(regex="a+").constraint == ("regex", "a+")
    assert SamplingParams(grammar="start: A").constraint == ("grammar", "start: A")
    same = [SamplingParams(json_schema=s).constraint for s in ({"a": 1}, ' {"a" : 1}')]
    assert same == [("json_schema", '{"a": 1}')] * 2
    assert SamplingParams(json_schema={}).constraint == ("json_schema", "{}")


def test_copies() -> None:
    params = SamplingParams(temperature=1, seed=5, n=3, stop=("x",))
    assert [(c.n, c.seed, c.stop) for c in params.copies()] == [(1, s, ("x",)) for s in (5, 6, 7)]
    assert [c.seed for c in SamplingParams(temperature=1, n=2).copies()] == [None, None]
    assert SamplingParams(seed=3).copies() == [SamplingParams(seed=3)]


def test_limits_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, max_tokens=1)
    SamplingParams(temperature=9, top_p=1e-9, top_k=5, min_p=0)


def test_stats_by_hand() -> None:
    stats = Stats()
    assert (stats.acceptance_length, stats.accepted_per_position) == (1.0, [])
    assert (stats.nodes_per_round, stats.rows_per_round, stats.tokens_per_forward) == (0, 1, 1)
    for drafted, accepted in [(3, 3), (3, 1), (3, 0), (2, 2)]:
        stats.count(chain([5] * drafted), range(1, accepted + 1), accepted + 1)
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 11, [3, 2, 1])
    assert stats.acceptance_length == 1 + 6 / 4
    assert stats.accepted_per_position == [0.75, 0.5, 0.25]
    stats.count(Draft(), [], 1)
    assert (stats.rounds, stats.forwards, stats.tokens) == (4, 5, 11)
    assert stats.acceptance_length == 1 + 6 / 4, "of rounds with drafts"
    assert stats.nodes_per_round == 11 / 4
    assert stats.rows_per_round == (11 + 5) / 5
    assert stats.tokens_per_forward == 11 / 5


def test_what_lookup_alone_knew() -> None:
    draft = Draft()
    for parent, prob in [(0, 0.6), (1, 0.0), (2, 0.0), (0, 0.0)]:
        draft.add(parent, 5, prob, 0.5)
    assert [draft.source(row) for row in range(1, 5)] == ["head", "lookup", "lookup", "lookup"]
    stats = Stats()
    stats.count(draft, [1, 2], 3)
    stats.count(draft, [4], 2)
    assert (stats.accepted, stats.accepted_from_lookup) == ([2, 1, 0], 2)


def test_stats_add() -> None:
    one, two = Stats(2, 6, [2, 1, 1], 3, 4, 8), Stats(1, 1, [1], 0, 1, 2)
    three = Stats(3, 7, [3, 1, 1], 3, 5, 10)
    assert one + two == two + one == sum([one, two], Stats()) == three
    assert two == Stats(1, 1, [1], 0, 1, 2)


def test_pending_is_what_was_not_run() -> None:
    request = Request(0, 3, [5, 6, 7, 8], SamplingParams(), Mock(), Mock(), num_computed_tokens=3)
    request.draft = chain([9, 10])
    assert request.pending == [8, 9, 10] and request.num_pending == 3
    assert request.output == [8]
