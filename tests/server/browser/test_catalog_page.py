"""The console's catalog and its plans of deployment, by real clicks."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest
from serving import Running
from typer.testing import CliRunner

from peagle.catalog import find_entry
from peagle.cli.deploy import app

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Shot = Callable[[Any, str], None]


def test_catalog(served: Running, opened: Open, shot: Shot) -> None:
    page = opened(f"{served.url}/#catalog")
    entry = page.locator(".entry[data-name=smollm2-135m]")
    (best, *_) = find_entry("smollm2-135m").heads["p-eagle"].acceptance
    entry.get_by_text(f"{best.dataset} {best.length:.2f}").wait_for()
    page.get_by_text("<b>of random weights</b>").wait_for()
    assert page.locator(".entry b").count() == 0
    entry.locator("summary").click()
    entry.get_by_text("your image of peagle").first.wait_for()
    shot(page, "catalog")


@pytest.mark.parametrize("lent", [True, False])
def test_deployment(served: Running, opened: Open, lent: bool) -> None:
    """The plan of each place, and the command for it, which a click copies; where the browser lends
    no clipboard, it selects the command."""
    page = opened("about:blank", permissions=["clipboard-read", "clipboard-write"])
    if not lent:
        page.add_init_script("delete Navigator.prototype.clipboard")
    page.goto(f"{served.url}/#catalog")
    entry = page.locator(".entry[data-name=gpt-oss-20b]")
    plans = entry.locator(".plans li")
    entry.locator("summary").wait_for()
    assert not plans.first.is_visible()
    entry.locator("summary").click()
    places = {"local": "peagle serve", "kubernetes": "--gpu", "sagemaker": "--region"}
    for number, (place, told) in enumerate(places.items()):
        plan = plans.nth(number)
        plan.get_by_text(told).wait_for()
        plan.get_by_role("button", name="Copy").click()
        plan.get_by_role("button", name="Copied" if lent else "Selected").wait_for()
        read = "navigator.clipboard.readText()" if lent else "getSelection().toString()"
        command = page.evaluate(read)
        assert command == f"peagle deploy gpt-oss-20b --to {place}"
        ran = CliRunner().invoke(app, [*shlex.split(command)[2:], "--dry-run"])
        assert ran.exit_code == 0, ran.output
