"""The console's page in front of the real vLLM, in a browser.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from peagle.server.run import bind

pytestmark = pytest.mark.vllm

TARGET, ROOT = "smollm2-135m", Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium")
# One thread, wherever it may run; and this package, for the page.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def page() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


@pytest.fixture
def vllm(vllm_python: str, tmp_path: Path) -> Iterator[str]:
    """Its URL, with the shipped head and the page."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "peagle", "serve", TARGET, "--engine", "vllm", "--k", "3"]
    line += ["--vllm-python", vllm_python, "--port", str(port), "--", "--max-model-len", "512"]
    line += ["--enforce-eager", "--middleware", "peagle.server.middleware.Pages"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(line, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.HTTPError:
        return False


def test_chat_and_charts(page: Any, vllm: str) -> None:
    """The answer is vLLM's, and the acceptance length what its /metrics count for it."""
    complaints: list[str] = []
    page.set_default_timeout(120_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
    page.goto(vllm)
    page.get_by_text(f"Ask {TARGET}").wait_for()
    page.get_by_label("Max tokens").fill("48")
    page.get_by_label("Message").fill("Write a Python function that reverses a list.")
    page.keyboard.press("Enter")
    page.locator(".message.assistant .words:not(:empty)").wait_for()
    page.locator("#log:not([aria-busy])").wait_for()
    assert "def " in page.locator(".message.assistant .words").inner_text()
    assert page.locator(".message .token").count() == 0
    assert page.locator("#tokens").inner_text() == "48"
    assert 1.5 < float(page.locator("#al").inner_text()) <= 4
    page.get_by_role("tab", name="Live").click()
    page.locator(".chart rect.bar").nth(2).wait_for()
    assert complaints == []
