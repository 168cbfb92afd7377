"""A curve that engines correct says when forwards become far slower than they were."""

import logging

import pytest

from peagle.engine.costs import MAX_SLOW_SECONDS, SLOW, Curve, WatchedCurve

MEASURED = {1: 0.01, 8: 0.02}


def observe(curve: WatchedCurve, ratio: float, seconds: float) -> None:
    """Forwards of one row that take `ratio` times what was measured, for some seconds."""
    for _ in range(round(seconds / (ratio * MEASURED[1]))):
        curve.observe([1], ratio * MEASURED[1])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_slow_forwards_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    curve = WatchedCurve(Curve(MEASURED))
    observe(curve, 4 * SLOW, 3 * MAX_SLOW_SECONDS)
    [line] = warnings(caplog)
    assert f"{4 * SLOW:.0f} times" in line
    assert "OMP_NUM_THREADS" in line


@pytest.mark.parametrize("ratio", [1.0, SLOW / 2])
def test_what_contexts_explain_is_not(ratio: float, caplog: pytest.LogCaptureFixture) -> None:
    observe(WatchedCurve(Curve(MEASURED)), ratio, 3 * MAX_SLOW_SECONDS)
    assert not warnings(caplog)


def test_a_short_disturbance_is_not(caplog: pytest.LogCaptureFixture) -> None:
    curve = WatchedCurve(Curve(MEASURED))
    for _ in range(5):
        observe(curve, 2 * SLOW, MAX_SLOW_SECONDS / 2)
        observe(curve, 1.0, 0.1)
    assert not warnings(caplog)


def test_the_measured_curve_stays() -> None:
    measured = Curve(MEASURED)
    curve = WatchedCurve(measured)
    curve.observe([1], 0.1)
    assert curve(1) > measured(1) == MEASURED[1]
