"""A budget that learns warns when forwards become far slower than they were."""

import logging

import pytest

from peagle.engine.adaptive import MAX_SLOW_SECONDS, SLOW, AdaptiveBudget
from peagle.engine.budget import Round
from peagle.engine.costs import Curve

MEASURED = {1: 0.01, 8: 0.02}


def new_budget() -> AdaptiveBudget:
    return AdaptiveBudget(lambda *_: [0.0], 0, Curve(MEASURED), Curve({1: 0.0}))


def learn(budget: AdaptiveBudget, ratio: float, seconds: float) -> None:
    """Rounds of one row that take `ratio` times what was measured, for some seconds."""
    for _ in range(round(seconds / (ratio * MEASURED[1]))):
        budget.learn(Round(1, [], ratio * MEASURED[1], 0.0, 0.0))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_slow_forwards_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    budget = new_budget()
    learn(budget, 4 * SLOW, 3 * MAX_SLOW_SECONDS)
    learn(budget, 1.0, 0.1)
    learn(budget, 4 * SLOW, 3 * MAX_SLOW_SECONDS)
    [line] = warnings(caplog)
    assert f"{4 * SLOW:.0f} times" in line
    assert "OMP_NUM_THREADS" in line


@pytest.mark.parametrize("ratio", [1.0, SLOW / 2])
def test_what_contexts_explain_is_not(ratio: float, caplog: pytest.LogCaptureFixture) -> None:
    learn(new_budget(), ratio, 3 * MAX_SLOW_SECONDS)
    assert not warnings(caplog)


def test_a_short_disturbance_is_not(caplog: pytest.LogCaptureFixture) -> None:
    budget = new_budget()
    for _ in range(5):
        learn(budget, 2 * SLOW, MAX_SLOW_SECONDS / 2)
        learn(budget, 1.0, 0.1)
    assert not warnings(caplog)
