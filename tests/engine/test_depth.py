"""Depth follows what rounds cost and what is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.depth import GAIN, PROBE, AdaptiveDepth, Curve, Odds, measure
from peagle.model.config import Method

FLAT = {1: 0.030, 8: 0.033, 64: 0.060}  # a small batch: rows cost next to nothing
STEEP = {1: 0.010, 8: 0.080, 64: 0.640}  # all rows cost the same
CHEAP = {1: 0.002, 64: 0.004}


def depths(method: Method, verify: dict[int, float], draft: dict[int, float]) -> AdaptiveDepth:
    return AdaptiveDepth(method, 7, Curve(verify), Curve(draft))


def taught(chooser: AdaptiveDepth, accepted: list[int], requests: int = 1) -> list[Odds]:
    odds = [Odds() for _ in range(requests)]
    for own in odds:
        for count in accepted * 20:
            chooser.count(own, 7, count)
    return odds


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_what_is_accepted_is_drafted(method: Method) -> None:
    good, bad = (depths(method, FLAT, CHEAP) for _ in range(2))
    assert good.choose(taught(good, [7, 6, 7])) == [7]
    assert bad.choose(taught(bad, [0])) == [0]
    some = depths(method, FLAT, CHEAP)
    assert 1 <= some.choose(taught(some, [1, 2, 2, 0]))[0] <= 4


def test_nothing_is_drafted_where_every_row_costs() -> None:
    loaded = depths("p-eagle", STEEP, CHEAP)
    assert loaded.choose(taught(loaded, [1, 0, 2], requests=4)) == [0] * 4


def test_passes_cost_depth_only_where_there_are_passes() -> None:
    slow = {1: 0.006, 64: 0.008}
    one, many = depths("p-eagle", FLAT, slow), depths("eagle3", FLAT, slow)
    deep, shallow = (chooser.choose(taught(chooser, [3, 2, 4]))[0] for chooser in (one, many))
    assert deep > shallow >= 1


def test_hard_requests_draft_less() -> None:
    chooser = depths("p-eagle", {1: 0.030, 64: 0.120}, CHEAP)
    easy, hard = Odds(), Odds()
    for _ in range(40):
        chooser.count(easy, 7, 6)
        chooser.count(hard, 7, 0)
    first, second = chooser.choose([easy, hard])
    assert first > second


def test_a_small_promise_is_not_enough() -> None:
    """Within GAIN of plain decoding nothing is drafted."""
    verify = {1: 1.0, 2: 1.9 / GAIN, 64: 100.0}
    chooser = depths("p-eagle", verify, {1: 0.0, 64: 0.0})
    assert chooser.choose(taught(chooser, [1])) == [1]
    chooser = depths("p-eagle", {1: 1.0, 2: 1.97, 64: 100.0}, {1: 0.0, 64: 0.0})
    assert chooser.choose(taught(chooser, [1])) == [0]


def test_quiet_rounds_are_probed() -> None:
    chooser = depths("p-eagle", STEEP, CHEAP)
    odds = taught(chooser, [0])
    chosen = [chooser.choose(odds)[0] for _ in range(3 * PROBE)]
    assert sum(chosen) == 3 and max(chosen) == 1


def test_costs_are_refreshed() -> None:
    curve = Curve(dict(FLAT))
    for _ in range(200):
        curve.observe([4], 0.5)
    assert curve(4) == pytest.approx(0.5, rel=1e-3)
    assert curve(64) == FLAT[64]
    for _ in range(200):
        curve.observe([1, 1, 1], 0.3)
    assert 3 * curve(1) == pytest.approx(0.3, rel=1e-3)


@given(st.integers(1, 200), st.floats(1e-4, 1.0))
def test_any_measurement_brings_the_curve_nearer(rows: int, seconds: float) -> None:
    curve = Curve(dict(FLAT))
    before = abs(curve(rows) - seconds)
    curve.observe([rows], seconds)
    assert abs(curve(rows) - seconds) <= before + 1e-12


def test_a_disturbed_measurement_is_mended() -> None:
    taken = iter([1.0] * 3 + [5.0] * 3 + [2.0] * 3 + [3.0] * 3)
    curve = measure(lambda rows: next(taken), 7)
    assert (curve.rows, curve.seconds) == ([1, 2, 4, 7], [1.0, 2.0, 2.0, 3.0])


def test_odds_by_hand() -> None:
    odds = Odds()
    for accepted in (2, 0, 1):
        odds.count(3, accepted, 1.0)
    assert odds.tried == [3, 2, 1] and odds.accepted == [2, 1, 0]
    chances = odds.chances(3, [0.5] * 3, 2.0)
    assert chances == pytest.approx([3 / 5, 3 / 5 * 2 / 4, 3 / 5 * 2 / 4 * 1 / 3])
