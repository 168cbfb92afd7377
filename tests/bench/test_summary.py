"""Rows: medians, percentiles and intervals of known samples."""

import json
from pathlib import Path

import numpy as np
import pytest

from peagle.bench.summary import (
    Cell,
    Played,
    Result,
    Sample,
    acceptance_row,
    compared,
    doubt,
    interval,
    percentiles,
    row,
)
from peagle.engine.drafting import Drafting
from peagle.engine.request import Stats

ROOT = Path(__file__).parents[2]
CHAINS = {"none": Drafting(), **{m: Drafting(m, 3) for m in ("p-eagle", "eagle3")}}


def result(
    method: str, rates: list[list[float]], said: str = "abcdef", concurrency: int = 1
) -> Result:
    """A result whose repeats have a conversation of 10 tokens at each of some tokens a second."""
    made = Result(Cell(CHAINS[method], concurrency, 0.0))
    for repeat in rates:
        samples = [Sample(i, 0, 10 / rate, 1 / rate, 10, said) for i, rate in enumerate(repeat)]
        seconds = sum(s.seconds for s in samples) / concurrency
        drafting = Stats(forwards=8, tokens=8)
        if method != "none":
            drafting = Stats(10, 30, [4, 1], 2, 12, 18)
        made.repeats.append(Played(samples, seconds, drafting))
    return made


def test_a_row() -> None:
    found = row(result("p-eagle", [[20, 20], [40, 40], [30, 30]]), result("none", [[10, 10]] * 3))
    assert found["output_tps"] == 30 and found["speed_up"] == 3
    assert (found["requests"], found["output_tokens"], found["repeats"]) == (6, 60, 3)
    assert found["acceptance_length"] == 1.5
    assert found["accepted_per_position"] == [0.4, 0.1]
    assert (found["nodes"], found["rows_per_round"]) == (3.0, 3.5)
    assert (found["tokens_per_forward"], found["accepted_from_lookup"]) == (1.5, 6)
    assert found["ttft_ms_p50"] == pytest.approx(1000 / 30, abs=0.01)
    assert found["errors"] == 0 and found["same"] == found["compared"] == 6


def test_a_target_alone_that_answered_nothing() -> None:
    """As where all prompts are longer than its context: there is nothing to compare with."""
    base = result("none", [[]])
    base.repeats[0] = base.repeats[0]._replace(seconds=0.1)
    assert "speed_up" not in row(result("p-eagle", [[20, 20]]), base)
    assert "speed_up" not in row(base, base)


def test_without_decoding_rounds_they_have_no_figures() -> None:
    found = acceptance_row(Stats(10, 30, [4, 1]))
    assert found["nodes"] == 3.0
    assert [found[name] for name in ("rows_per_round", "tokens_per_forward")] == [None, None]
    assert found["accepted_from_lookup"] is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"method": "none", "k": 0}, "-"),
        ({"method": "p-eagle", "k": 3}, "K = 3"),
        ({"method": "p-eagle", "k": "adaptive", "max_nodes": None, "lookup": False}, "adaptive"),
        ({"method": "p-eagle", "k": "adaptive", "lookup": True}, "adaptive + lookup"),
        ({"method": "p-eagle", "k": None, "max_nodes": 12, "lookup": False}, "12 nodes"),
        ({"method": "p-eagle", "k": None, "max_nodes": 12, "lookup": True}, "12 nodes + lookup"),
        ({"method": "lookup", "k": None, "max_nodes": 12, "lookup": True}, "12 nodes"),
    ],
)
def test_a_setting_in_words(row: dict[str, object], said: str) -> None:
    drafting = Drafting.from_row(row)
    assert str(drafting) == said
    assert drafting.row == {"max_nodes": None, "lookup": False} | row


def test_speed_up_is_repeat_by_repeat() -> None:
    """A machine that was slow in one repeat slowed both."""
    found = compared(result("p-eagle", [[20, 20], [2, 2]]), result("none", [[10, 10], [1, 1]]))
    assert found["speed_up"] == 2
    assert found["speed_up_95"] == [2, 2]


def test_repeats_without_an_answer_do_not_count() -> None:
    fast, base = result("p-eagle", [[20, 20]] * 3), result("none", [[10, 10]] * 3)
    base.repeats[0] = base.repeats[0]._replace(samples=[])
    fast.repeats[1] = fast.repeats[1]._replace(samples=[])
    assert row(fast, base)["speed_up"] == 2
    base.repeats[2] = base.repeats[2]._replace(samples=[])
    assert "speed_up" not in row(fast, base)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_intervals_hold_the_point_and_tell_spread(concurrency: int) -> None:
    rng = np.random.default_rng(0)
    noisy = [list(rng.uniform(5, 50, 40)) for _ in range(3)]
    wide = result("none", noisy, concurrency=concurrency)
    speed = float(np.median(wide.speeds))
    low, high = interval(speed, wide)
    assert low < speed < high and high / low > 1.1
    narrow = interval(10.0, result("none", [[10.0] * 40] * 3))
    assert narrow == [10.0, 10.0]


def test_the_interval_covers_the_truth() -> None:
    """About 95 % of the intervals of measurements of one distribution contain its mean."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(60):
        seconds = rng.gamma(4, 0.25, 30)  # a conversation of 10 tokens takes 1 s in the mean
        made = result("none", [list(10 / seconds)])
        low, high = interval(made.speeds[0], made)
        inside += low <= 10 <= high
    assert 51 <= inside <= 60


def test_one_conversation_has_no_interval() -> None:
    found = row(result("none", [[10]]), None)
    assert found["output_tps_95"] is None
    assert (found["acceptance_length"], found["accepted_per_position"]) == (None, [])


def test_other_answers_are_counted() -> None:
    found = compared(result("p-eagle", [[9, 9]], said="abXdef"), result("none", [[9, 9]]))
    assert (found["same"], found["compared"]) == (0, 2)


@pytest.mark.parametrize(("speed_up", "sound"), [(0.8, True), (1.65, True), (1.66, False)])
def test_tokens_a_target_forward_limit_the_speed_up(speed_up: float, sound: bool) -> None:
    found = row(result("p-eagle", [[10 * speed_up] * 2]), result("none", [[10, 10]]))
    assert found["tokens_per_forward"] == 1.5
    assert (doubt(found) is None) == sound


@pytest.mark.parametrize("name", ["bench", "trees"])
def test_no_committed_speed_up_is_in_doubt(name: str) -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    rows = report.get("rows") or [row for part in report["parts"].values() for row in part]
    assert sum("speed_up" in row for row in rows) > 10
    assert [row for row in rows if doubt(row)] == []


def test_percentiles_are_numpys() -> None:
    seconds = [0.1, 0.2, 0.3, 0.9]
    assert percentiles("x", seconds) == {
        "x_ms_p50": pytest.approx(250.0),
        "x_ms_p99": pytest.approx(float(np.percentile(seconds, 99)) * 1e3, abs=0.01),
    }
    assert percentiles("x", []) == {"x_ms_p50": None, "x_ms_p99": None}


def test_failed_turns_count_as_errors_alone() -> None:
    made = result("none", [[10, 10]])
    failed = Sample(2, 0, 9.0, 0.0, 0, error="gone")
    made.repeats[0] = made.repeats[0]._replace(samples=[*made.repeats[0].samples, failed])
    found = row(made, None)
    assert (found["requests"], found["errors"], found["error"]) == (2, 1, "gone")
