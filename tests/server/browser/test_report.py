"""The page of `peagle bench`, opened from a file: all of it is shown, and nothing is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.bench import report as pages

pytestmark = pytest.mark.browser

ALONE = {"none": 20.0, "eagle3": 26.0, "p-eagle": 31.0}


def row(method: str, k: int, concurrency: int) -> dict[str, Any]:
    """One that `peagle bench` could have measured."""
    speed = ALONE[method] * concurrency**0.7
    drafts = {
        "acceptance_length": 1.0 + 0.2 * k,
        "accepted_per_position": [0.5 / i for i in range(1, k + 1)],
    }
    return {
        "method": method, "k": k, "head": None, "concurrency": concurrency, "temperature": 0.0,
        "repeats": 1, "requests": 12, "output_tokens": 768, "seconds": 768 / speed,
        "output_tps": speed, "output_tps_95": [0.95 * speed, 1.05 * speed], "ttft_ms_p50": 90.0,
        "ttft_ms_p99": 140.0, "tpot_ms_p50": 1000 / speed, "tpot_ms_p99": 1300 / speed,
        "speed_up": speed / (ALONE["none"] * concurrency**0.7), "speed_up_95": [1.0, 2.0],
        "errors": 0, "error": None, "same": 12, "compared": 12,
        **(drafts if k else {"acceptance_length": None, "accepted_per_position": None}),
    }  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> str:
    cells = [("none", 0), ("eagle3", 3), ("eagle3", 7), ("p-eagle", 3), ("p-eagle", 7)]
    rows = [row(method, k, load) for load in (1, 4) for method, k in cells]
    settings = {"target": "a-target", "dataset": "humaneval", "engine": "native", "repeats": 1}
    report = {"complete": True, "device": "a machine", "versions": {"torch": "2"},
              "git_commit": None, "settings": settings, "rows": rows}  # fmt: skip
    pages.write(report, tmp_path / "bench.json")
    return (tmp_path / "bench.html").as_uri()


def test_opened_from_a_file(
    opened: Callable[..., Any], page: str, shot: Callable[[Any, str], None]
) -> None:
    asked: list[str] = []
    shown = opened("about:blank", height=1600)
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(page)
    assert shown.locator("h1").inner_text() == "a-target · humaneval"
    assert shown.locator("figure svg").count() == 2
    for picture in shown.locator("figure svg").all():
        box = picture.bounding_box()
        assert box and box["width"] > 300 and box["height"] > 150
    assert shown.locator("table").first.locator("tr").count() == 1 + 10
    assert "1.55×" in shown.locator("table").first.inner_text(), "31 against 20 tokens a second"
    assert asked == [page], "a page that needs a network"
    shot(shown, "report")


def test_on_a_phone(opened: Callable[..., Any], page: str) -> None:
    """Tables scroll inside themselves; the page does not."""
    shown = opened(page, width=390)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
