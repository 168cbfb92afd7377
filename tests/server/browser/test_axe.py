"""axe-core finds nothing serious on any page of the console, in either colour, at either width."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
from console_page import TABS, ask, tab
from serving import Running

pytestmark = pytest.mark.browser

FINDINGS = """async () => (await axe.run(document)).violations
    .filter((found) => ["serious", "critical"].includes(found.impact))
    .map((found) => [found.id, ...found.nodes.map((node) => node.html.slice(0, 150))])"""


@pytest.fixture(scope="module")
def axe() -> str:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    return (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_no_serious_finding(
    served: Running, opened: Callable[..., Any], axe: str, scheme: str, width: int
) -> None:
    page = opened(served.url, width=width, color_scheme=scheme)
    page.locator(".dot.on").wait_for()
    page.evaluate(axe)
    assert page.evaluate(FINDINGS) == [], "the welcome"
    ask(page, "the cat sat on the mat")
    page.locator(".drafts summary").click()
    for name in TABS:
        tab(page, name)
        if name == "Race":
            page.locator("#race-tokens").select_option("48")
            page.get_by_role("button", name="Start the race").click()
            page.locator("#verdict").wait_for()
        if name == "Catalog":
            page.locator(".entry summary").first.click()
        assert page.evaluate(FINDINGS) == [], name
    page.locator("#key-dialog").evaluate("dialog => dialog.showModal()")
    assert page.evaluate(FINDINGS) == [], "the dialog"
