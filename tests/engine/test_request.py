"""Sampling parameters are checked; statistics count as vLLM does."""

import pytest

from peagle.config import InputError
from peagle.engine.request import Request, SamplingParams, Stats


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "0 (greedy) or more"),
        ("temperature", float("nan"), "0 (greedy) or more"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_k", -1, "0 (all) or more"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("max_tokens", 0, "at least 1"),
    ],
)
def test_bad_parameters(name: str, value: float, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} {value}: must be {allowed}"


def test_empty_stop_string() -> None:
    with pytest.raises(InputError, match="must not be empty"):
        SamplingParams(stop=("a", ""))


def test_limits_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, max_tokens=1)
    SamplingParams(temperature=9, top_p=1e-9, top_k=5, min_p=0)


def test_stats_by_hand() -> None:
    stats = Stats()
    assert (stats.acceptance_length, stats.accepted_per_position) == (1.0, [])
    for drafted, accepted in [(3, 3), (3, 1), (3, 0), (2, 2)]:
        stats.count(drafted, accepted)
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 11, [3, 2, 1])
    assert stats.acceptance_length == 1 + 6 / 4
    assert stats.accepted_per_position == [0.75, 0.5, 0.25]


def test_stats_add() -> None:
    one, two = Stats(2, 6, [2, 1, 1]), Stats(1, 1, [1])
    one.add(two)
    assert one == Stats(3, 7, [3, 1, 1])
    two.add(Stats(2, 6, [2, 1, 1]))
    assert two == Stats(3, 7, [3, 1, 1])


def test_pending_is_what_was_not_run() -> None:
    request = Request(0, 3, [5, 6, 7, 8], SamplingParams(), computed=3, draft=[9, 10])
    assert request.pending == [8, 9, 10]
    assert request.output == [8]
