"""Depth follows what rounds cost, how sure the drafter is, and whether it is right to be."""

import random
from itertools import pairwise
from operator import mul
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.adaptive import (
    CHANCES,
    EXPLORE_NODES,
    EXPLORE_SHARE,
    MAX_LEFT,
    REST,
    AdaptiveBudget,
    Plan,
)
from peagle.engine.budget import Ask, Calibration, Round
from peagle.engine.costs import FAR, PROMPT_ROWS, Curve, measure, row_counts
from peagle.engine.lookup import LookupCalibration, with_lookup
from peagle.engine.tree import Candidate, Draft, Match, along, grow
from peagle.methods.registry import METHODS

FLAT = {1: 0.030, 8: 0.033, 64: 0.060}  # a small batch: rows cost next to nothing
STEEP = {1: 0.010, 8: 0.080, 64: 0.640}  # all rows cost the same
CHEAP = {1: 0.0005, 64: 0.001}
READY = Ask(missed=1, left=100)  # a request in the middle of its answer


def chooser(
    method: str = "p-eagle", verify: dict[int, float] = FLAT, draft: dict[int, float] = CHEAP
) -> AdaptiveBudget:
    way = METHODS[method]
    return AdaptiveBudget(way.passes, 7, Curve(verify), Curve(draft))


def chain(budget: AdaptiveBudget, probs: list[float]) -> Draft:
    """The draft of a drafter with these probabilities."""
    nodes = [Candidate(0, p, budget.calibration(at, p)) for at, p in enumerate(probs)]
    return grow(along(nodes), len(nodes))


def keep(budget: AdaptiveBudget, *drafts: list[float]) -> list[int]:
    """Nodes that are verified of the drafts of so many requests."""
    return budget.keep(len(drafts), [chain(budget, probs) for probs in drafts], 0.001)


def settle(budget: AdaptiveBudget, probs: list[float]) -> None:
    """So many drafts that what was before no longer counts."""
    for _ in range(500):
        keep(budget, probs)


def decode(budget: AdaptiveBudget, sure: list[float], batch: int = 1) -> tuple[int, int]:
    """Rounds with drafts as sure as that, and right so often. Returns the median depth of the last
    rounds, and the median number of nodes that are verified of a draft."""
    chance, depths, counts = random.Random(0), list[int](), list[int]()
    for _ in range(160):
        depth = max(budget.choose(batch, [READY] * batch, []))
        kept = keep(budget, *[sure[:depth]] * batch)[0]
        if kept:
            right = (chance.random() < p for p in sure[:kept])
            accepted = next((at for at, hit in enumerate(right) if not hit), kept)
            budget.calibration.count(chain(budget, sure[:kept]), range(1, accepted + 1))
        depths.append(depth)
        counts.append(kept)
    return median_low(depths[-40:]), median_low(counts[-40:])


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_what_is_accepted_is_drafted(method: str) -> None:
    assert decode(chooser(method), [0.95] * 7) == (7, 7)
    depth, kept = decode(chooser(method), [0.6] * 7)
    assert 1 <= kept <= depth
    assert decode(chooser(method, verify=STEEP), [0.3] * 7)[0] == 0


def test_the_fuller_the_machine_the_less_is_verified() -> None:
    kept = [decode(chooser(verify={1: 0.03, 64: 0.2}), [0.8] * 7, batch)[1] for batch in (1, 8, 48)]
    assert kept[0] > kept[1] > kept[2]


def test_passes_cost_depth_only_where_there_are_passes() -> None:
    slow = {1: 0.006, 64: 0.008}
    deep, shallow = (decode(chooser(m, draft=slow), [0.75] * 7)[0] for m in ("p-eagle", "eagle3"))
    assert deep > shallow >= 1


def test_what_a_round_needs_once_is_not_the_cost_of_each_pass() -> None:
    budget = chooser("eagle3")
    for number in range(400):
        passes = 1 + number % 5
        drafting = 0.0020 + 0.0003 * (passes - 1)
        budget.learn(Round(1 + passes, [1.0] * passes, FLAT[1], drafting, 0.0))
    assert budget.extra + budget.draft(1) == pytest.approx(0.0020, rel=0.1)
    assert budget.deeper(1) == pytest.approx(0.0003, rel=0.2)


def test_what_a_round_needs_once_is_not_the_cost_of_rows() -> None:
    """A prompt would cost several times what it does, and would not be drafted for."""
    budget = chooser(draft={1: 0.0010, 8: 0.0017, 256: 0.0500})
    for _ in range(400):
        budget.learn(Round(4, [5.0], budget.verify(4), 0.0014 + 0.0030, 0.0))
    assert budget.extra == pytest.approx(0.0030, rel=0.15)
    assert budget.draft(PROMPT_ROWS) < 0.065


def test_depths_not_drafted_go_on_as_those_before() -> None:
    budget = chooser("eagle3")
    settle(budget, [0.8] * 2)
    chances = [sum(map(mul, counts, CHANCES)) for counts in budget.expected]
    assert chances == pytest.approx([0.8**depth for depth in range(1, 8)], rel=0.1)


def test_depths_that_lookup_alone_reaches_are_not_the_heads() -> None:
    budget, lookups, match = chooser("eagle3"), LookupCalibration(), Match(4, tuple(range(10, 17)))
    head = along([Candidate(at, 0.8, 0.8) for at in range(2)])
    for _ in range(500):
        budget.keep(1, [grow(with_lookup(head, match, lookups), 12, match)], 0.001)
    chances = [sum(map(mul, counts, CHANCES)) for counts in budget.expected]
    # The other half of depth 0 is lookup's.
    assert chances[:4] == pytest.approx([0.5, 0.4, 0.4**1.5, 0.4**2], rel=0.1)


def test_of_two_requests_the_surer_one_gets_more_rows() -> None:
    budget = chooser(verify={1: 0.030, 64: 0.300})
    decode(budget, [0.8] * 7, batch=2)
    surer, other = keep(budget, [0.95] * 7, [0.4] * 7)
    assert surer > other


def test_a_drafter_that_is_too_sure_is_found_out() -> None:
    budget, sure = chooser(verify=STEEP), [0.95] * 7
    for _ in range(60):
        budget.calibration.count(chain(budget, sure), [])
    assert budget.calibration(0, 0.95) < 0.2
    settle(budget, sure)
    assert budget.choose(1, [READY], []) == [0]


def test_a_small_promise_is_not_enough() -> None:
    """Two tokens a round for twice the time: nothing is gained, and nothing is drafted."""
    depths = chooser(verify={1: 1.0, 2: 1.97, 64: 64.0}, draft={1: 0.0, 64: 0.0})
    settle(depths, [0.99])
    assert depths.choose(1, [READY], []) == [0]


def test_a_prompt_is_run_where_it_pays() -> None:
    """Drafting saves about 0.015 s a token here; a slot of a prompt costs 0.001 s."""
    depths = chooser(draft={1: 0.001, 64: 0.002, PROMPT_ROWS: 0.001 * PROMPT_ROWS})
    decode(depths, [0.9] * 7)

    def pays(missed: int, left: int) -> bool:
        return depths.choose(1, [Ask(missed, left)], []) != [0]

    assert pays(4, 1) and pays(500, 100) and pays(3000, MAX_LEFT)
    assert not pays(500, 10)
    assert not pays(100_000, 10 * MAX_LEFT), "an answer may end long before its limit"
    assert depths.choose(2, [Ask(4, 100), Ask(500, 10)], []) == [7, 0]
    settle(depths, [0.01] * 7)
    assert not pays(1, MAX_LEFT)


def test_those_for_whom_it_pays_bear_what_a_pass_costs() -> None:
    """A pass as dear as half a round: it pays for eight, not for the one that has its prompt."""
    depths = chooser(verify={1: 0.030, 64: 0.040}, draft={1: 0.015, 64: 0.016, PROMPT_ROWS: 0.3})
    decode(depths, [0.9] * 7)
    assert min(depths.choose(8, [READY] * 8, [])) >= 4
    assert depths.choose(8, [READY] + [Ask(2000, 20)] * 7, []) == [0] * 8


def test_no_more_is_drafted_than_may_be_said() -> None:
    depths = chooser()
    decode(depths, [0.95] * 7)
    assert depths.choose(3, [READY, Ask(1, 2), Ask(1, 0)], []) == [7, 2, 0]


@pytest.mark.parametrize("other", [Ask(300, 100), Ask(4, 100, decodes=False), Ask(1, 0)])
def test_quiet_time_is_probed_and_little_of_it(other: Ask) -> None:
    """Drafting and verifying are tried apart: each takes its share of the time. Where no draft
    would follow, as after a part of a prompt, nothing is tried."""
    depths, spent, quiet = chooser(verify=STEEP), 0.0, 0.0
    settle(depths, [0.05] * 7)
    for _ in range(3000):
        if other != Ask(300, 100):
            assert depths.choose(1, [other], []) == [0]
        first, second = depths.choose(2, [other, Ask(40, 100)], [])
        quiet += depths.verify(2)
        if second:
            spent += depths.draft(PROMPT_ROWS) / PROMPT_ROWS * 40 + depths.draft(7)
        kept = keep(depths, [], [0.05] * second)[1]
        if kept:
            assert kept == EXPLORE_NODES
            spent += depths.verify(2 + EXPLORE_NODES) - depths.verify(2)
        assert not first, "the second one costs less, or alone can be drafted for"
    assert 0.7 * EXPLORE_SHARE < spent / quiet <= 2 * EXPLORE_SHARE


@pytest.mark.parametrize("right", [True, False])
def test_lookup_that_does_not_pay_is_tried_now_and_then(right: bool) -> None:
    """At a load where half of all looked-up tokens would not pay: all of them do, none does."""
    verify = Curve({1: 0.02, 16: 0.033, 128: 0.16})
    budget = AdaptiveBudget(lambda *_: [0.0], 0, verify, Curve({1: 0.0}))
    lookups, match = LookupCalibration(), Match(4, tuple(range(7)))
    alone, lost, kept = budget.verify(16), 0.0, 0
    for _ in range(2000):
        drafts = [grow(with_lookup(along([]), match, lookups), 7, match) for _ in range(16)]
        counts = budget.keep(16, drafts, 0.0)
        kept = sum(counts)
        lost += budget.verify(16 + kept) - alone
        for draft, count in zip(drafts, counts, strict=True):
            lookups.count(draft.first(count), range(1, count + 1) if right else [])
    if right:
        assert kept == 16 * 7
    else:
        assert 0 < lost <= EXPLORE_SHARE * 2000 * alone


def test_a_bad_beginning_is_not_the_end() -> None:
    """Half of all first tokens stand, but the first three drafts did not."""
    depths = chooser()
    for _ in range(3):
        keep(depths, [0.5] * 7)
        depths.calibration.count(chain(depths, [0.5] * 7), [])
    assert depths.choose(1, [READY], []) != [0]


def test_calibration_by_hand() -> None:
    calibration = Calibration()
    assert calibration(0, 0.35) == 0.35 and calibration(9, 1.0) == 1.0
    #       0: 0.5 ── 0.6        the second child of the newest token is accepted, then its own
    #       1: 0.2 ── 0.3, 0.2   second one
    draft = Draft([5, 6, 7, 8, 9], [0, 0, 1, 2, 2], [0.5, 0.2, 0.6, 0.3, 0.2], [1.0] * 5)
    for _ in range(6000):
        calibration.count(draft, [2, 5])
    assert calibration(0, 0.2) == pytest.approx(0.2 / 0.7, rel=0.01)
    assert calibration(1, 0.2) == pytest.approx(0.2 / 0.5, rel=0.01)
    assert calibration(1, 0.9) == 1.0
    assert calibration(2, 0.4) == 0.4, "nobody has drafted behind that node"


def test_drafts_of_lookup_alone_tell_nothing_of_the_head() -> None:
    calibration = Calibration()
    for _ in range(10_000):
        calibration.count(Draft([5], [0], [0.0], [1.0]), [1])
    calibration.count(Draft([5], [0], [0.5], [1.0]), [])
    assert calibration(0, 0.5) == pytest.approx(0.5, abs=0.1), "one miss among the first few"


def test_the_likeliest_nodes_are_verified_whoever_has_them() -> None:
    """By hand: 10 ms a round and 1 ms a row; (2 + gain) / time is largest with three nodes."""
    budget = chooser(verify={1: 0.011, 100: 0.110}, draft={1: 0.0, 64: 0.0})
    one = Draft([1, 2, 3], [0, 0, 1], [1.0] * 3, [0.6, 0.3, 0.05])
    two = Draft([1, 2], [0, 0], [1.0] * 2, [0.5, 0.1])
    assert budget.keep(2, [one, two], 0.0) == [2, 1]
    assert budget.keep(2, [two, one], 0.0) == [1, 2]
    assert budget.keep(2, [Draft(), Draft()], 0.0) == [0, 0]


def test_a_slower_machine_is_slower_at_all_row_counts() -> None:
    curve, before = Curve(dict(FLAT)), Curve(dict(FLAT))
    for _ in range(200):
        curve.observe([4], 2 * before(4))
    assert all(1.3 < curve(rows) / before(rows) <= 2.01 for rows in (1, 16, 64, 100))


def test_a_drafter_that_rests_is_as_much_slower_as_the_target() -> None:
    """And as much faster: another process that has ended must not keep it resting."""
    budget = chooser()
    for ratio in (3.0, 1.0):
        for _ in range(100):
            budget.learn(Round(1, [], ratio * FLAT[1], 0.0, 0.0))
        assert budget.draft(64) == pytest.approx(ratio**FAR * CHEAP[64], rel=0.05)


def test_ups_and_downs_leave_no_trace() -> None:
    """Not even at row counts that are never run: they would add up over many runs."""
    curve, before = Curve(dict(FLAT)), Curve(dict(FLAT))
    for turn in range(20_000):
        curve.observe([1], before(1) * (0.6, 1.4)[turn % 2])
    assert curve(64) == pytest.approx(before(64), rel=0.1)


def test_the_shape_is_learnt_where_rounds_are_run() -> None:
    """Measured at the start: 16 rows take half as long again as 8. They do not."""
    curve = Curve({1: 0.006, 8: 0.006, 16: 0.009, 64: 0.036})
    for turn in range(600):
        rows = (8, 8, 8, 13, 16)[turn % 5]
        curve.observe([rows], 0.007 + 0.0001 * rows)
    for rows in (8, 13, 16):
        assert curve(rows) == pytest.approx(0.007 + 0.0001 * rows, rel=0.02)


def test_a_hiccup_makes_no_number_of_rows_look_dear() -> None:
    """As the first forward of so many rows, for which a CPU makes its kernels."""
    curve = Curve(dict(FLAT))
    for rows in (3, 5, 6, 7):
        curve.observe([rows], 10.0)
    assert curve(4) < 1.5 * Curve(dict(FLAT))(4)
    for _ in range(50):
        curve.observe([8], Curve(dict(FLAT))(8))
    assert curve(4) == pytest.approx(Curve(dict(FLAT))(4), rel=0.07)


@given(st.integers(1, 200), st.floats(1e-4, 1.0))
def test_any_measurement_brings_the_curve_nearer(rows: int, seconds: float) -> None:
    curve = Curve(dict(FLAT))
    before = abs(curve(rows) - seconds)
    curve.observe([rows], seconds)
    assert abs(curve(rows) - seconds) <= before + 1e-12


def test_a_disturbed_measurement_is_mended() -> None:
    """The row counts take turns: a while in which all is slow leaves the others as they are."""
    taken = iter([9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 5.0, 2.0, 3.0, 3.0] + [9.0] * 15)
    curve = measure(lambda rows: next(taken), row_counts(4, 8, 64))
    assert (curve.rows, curve.seconds) == ([1, 2, 4, 8, 64], [1.0, 2.0, 2.0, 3.0, 3.0])


def test_plans_pause_where_drafting_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = chooser(verify=STEEP)
    plans = list[int]()
    make = budget._plan

    def counted(load: int, requests: float, found: list[float]) -> Plan:
        plans.append(load)
        return make(load, requests, found)

    monkeypatch.setattr(AdaptiveBudget, "_plan", lambda _, *given: counted(*given))
    for _ in range(2 * (REST + 1)):
        budget.choose(48, [READY] * 48, [0.5])
    assert plans == [48] * 4, "two at a time: with what was looked up, and without"
    budget.choose(47, [READY] * 47, [])  # fewer requests: it may pay now
    assert plans[4:] == [47], "one: nothing was looked up"


def test_plans_pause_until_a_request_comes_that_may_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = chooser(draft={1: 0.001, 64: 0.002, PROMPT_ROWS: 0.001 * PROMPT_ROWS})
    decode(budget, [0.9] * 7)
    plans = list[int]()
    make = budget._plan
    monkeypatch.setattr(
        budget, "_plan", lambda load, *given: plans.append(load) or make(load, *given)
    )
    for emitted in range(REST):
        assert budget.choose(1, [Ask(500 + emitted, 10 - emitted)], []) == [0]
    assert plans == [1]
    assert budget.choose(2, [Ask(4, 100), Ask(500, 10)], []) == [7, 0]


def test_a_round_in_which_lookup_is_enough_says_nothing_of_the_next() -> None:
    budget = chooser()
    assert budget.choose(1, [READY], [0.99] * 12) == [0]
    assert budget.choose(1, [READY], []) != [0]


def test_nodes_that_promise_next_to_nothing_are_not_verified() -> None:
    """A row costs a hundredth of a second, like a token of a round without nodes."""
    assert keep(chooser(verify={1: 0.100, 11: 0.200}), [0.11]) == [0]
    assert keep(chooser(verify={1: 0.100, 11: 0.200}), [0.2]) == [1]


@given(st.integers(2, 600))
def test_points_of_a_curve_lie_close_where_batches_do(rows: int) -> None:
    counts = row_counts(rows)
    assert counts[0] == 1
    assert counts[-1] == rows
    assert all(more <= 2 * fewer for fewer, more in pairwise(counts))
    assert all(2 * more <= 3 * fewer for fewer, more in pairwise(counts) if fewer >= 16)
