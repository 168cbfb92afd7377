"""Chromium, driven by Playwright; where it is missing the tests say so, and are skipped."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from like_vllm import LikeVllm
from serving import Running, Serve

ARTEFACTS = Path(__file__).parents[3] / "results" / "browser"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

Open = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)  # before anything is made for the tests
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root, and needs more than containers allow.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def complaints() -> list[str]:
    """Errors of the browser; a test that expects one removes it."""
    return []


@pytest.fixture
def opened(browser: Any, complaints: list[str]) -> Iterator[Open]:
    """Opens the console of a server, in a window of its own."""
    contexts = []

    def open_console(url: str, width: int = 1280, height: int = 800, **how: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **how)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.goto(url)
        return page

    yield open_console
    for context in contexts:
        context.close()
    assert not complaints, complaints


@pytest.fixture
def shot() -> Callable[[Any, str], None]:
    """Keeps a picture of a page, for people."""

    def keep(page: Any, name: str) -> None:
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"{name}.png")

    return keep


@pytest.fixture
def served(serve: Serve, catalog: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The tiny target with a head of each method."""
    monkeypatch.setenv("PEAGLE_CATALOG", str(catalog))
    return serve()


@pytest.fixture
def like_vllm() -> Iterator[LikeVllm]:
    made = LikeVllm()
    yield made
    made.stop()
