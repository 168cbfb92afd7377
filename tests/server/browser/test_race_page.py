"""The console's race, by real clicks."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from serving import Brake, Running, until
from test_widths import answered, events

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Shot = Callable[[Any, str], None]
LANES = ["Target alone", "EAGLE-3", "EAGLE-3 + lookup", "P-EAGLE"]


def test_race(served: Running, opened: Open, shot: Shot, brake: Brake) -> None:
    """Four lanes, the same ids, replayed at their speeds; it can be replayed, and stopped."""
    page = opened(f"{served.url}/#race")
    page.locator(".lane").nth(3).wait_for()
    shot(page, "race-before")
    page.locator("#race-tokens").select_option("48")
    page.get_by_label("Prompt").fill("the cat sat on the mat")
    page.get_by_role("button", name="Start the race").click()
    page.get_by_text(re.compile(r"^Identical: all \d+ token ids")).wait_for()
    lanes = page.locator(".lane")
    sizes = ["no drafts", "K = 3", "adaptive + lookup", "K = 3"]
    names = [name.splitlines() for name in lanes.locator("h3").all_inner_texts()]
    assert names == [list(pair) for pair in zip(LANES, sizes, strict=True)]
    page.get_by_role("button", name="Replay").click()
    page.locator(".lane.done").nth(3).wait_for()
    texts = lanes.locator(".lane-text").all_text_contents()
    assert len(set(texts)) == 1 and texts[0]
    ratios = [float(r.split()[0]) for r in lanes.locator(".ratio").all_inner_texts()]
    assert ratios[0] == 1 and len(ratios) == 4
    facts = lanes.locator(".lane-facts").all_inner_texts()
    assert facts[0].startswith("first token ") and "tokens a target forward" in facts[3]
    assert lanes.nth(3).locator(".token").count() > 0 == lanes.nth(0).locator(".token").count()
    assert page.locator(".lane.fastest").count() == 1
    shot(page, "race")
    assert "48 token ids" in page.locator("#verdict").inner_text()
    brake.last = brake.steps + 9
    page.get_by_role("button", name="Start the race").click()
    until(lambda: not brake.go.is_set())
    page.get_by_label("Prompt").fill("")
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped").wait_for()
    brake.go.set()


def test_lanes_without_a_head(running: Running, opened: Open, shot: Shot) -> None:
    """Shown from the start, with the reason; the others race."""
    page = opened(f"{running.url}/#race")
    page.locator(".lane.absent").nth(1).wait_for()
    assert page.locator(".lane.absent h3").all_inner_texts() == LANES[1:3]
    why = page.locator(".lane.absent .note").first.inner_text()
    assert re.fullmatch(r"no EAGLE-3 head of tiny\S* is known: train one with peagle train", why)
    page.get_by_role("button", name="Start the race").click()
    page.get_by_text(re.compile(r"^Identical: all \d+ token ids")).wait_for()
    assert page.locator(".lane .ratio").count() == 2
    shot(page, "race-without-a-head")


def test_a_ratio_that_cannot_be_is_not_shown(served: Running, opened: Open) -> None:
    """Three times as fast at two tokens a target forward: the target alone was slowed."""
    page = opened(f"{served.url}/#race")
    page.locator(".lane").nth(3).wait_for()
    lanes = [{"title": name, "drafts": "K = 3", "missing": None} for name in LANES[:3]]
    rounds = [
        {"lane": lane, "at": at, "tokens": 21, "forwards": forwards, "rounds": 5, "drafted": 15,
         "accepted": 5, "pieces": [], "ended": True}
        for lane, (at, forwards) in enumerate([(6.0, 20), (2.0, 10), (3.0, 10)])
    ]  # fmt: skip
    verdict = {"identical": True, "same_tokens": 21}
    answered(page, "peagle/race", events({"lanes": lanes}, *rounds, verdict))
    page.get_by_role("button", name="Start the race").click()
    page.get_by_text("Identical").wait_for()
    ratios = page.locator(".lane .ratio").all_inner_texts()
    assert ratios == ["1.00 ×", "machine busy: race again", "2.00 ×"]
