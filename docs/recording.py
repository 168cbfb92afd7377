"""Record the console's race for the README, once for light and once for dark pages.

    python docs/recording.py [--output docs/figures]

Needs Chromium and the package playwright. A server of the demo target with its heads is started;
the real page runs the race, and its replay is photographed. Run it on an idle machine: the page
shows what it has measured.
"""

import argparse
import io
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent / "figures"
HEAD = Path(__file__).parents[1] / "heads" / "smollm2-135m-p-eagle"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROMPT = "Write a Python function that reverses a list."
TOKENS = "192"
WIDTH, HEIGHT = 1120, 760  # of the window, in CSS pixels
SHRINK = 0.75  # of the picture
HOLD = 3.0  # seconds that the result stays
MOST_BYTES = 1_500_000


def serve() -> tuple[subprocess.Popen[str], str]:
    """A server of the demo target, and its address."""
    command = [sys.executable, "-m", "peagle", "serve", "smollm2-135m", "--head", str(HEAD)]
    process = subprocess.Popen(
        [*command, "--port", "8765"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while '"serving"' not in process.stderr.readline():
        assert process.poll() is None, "the server does not start"
    return process, "http://127.0.0.1:8765"


class Picture(NamedTuple):
    """A picture, and the seconds until the next one."""

    image: Image.Image
    seconds: float


def race(page: Page, url: str) -> list[Picture]:
    """Run a race on the page; pictures of its replay and of the result."""
    page.goto(url)
    page.click("#tab-race")
    page.fill("#race-prompt", PROMPT)
    page.select_option("#race-tokens", TOKENS)
    page.click("#race-start")
    page.wait_for_selector("#replay:not([hidden])", timeout=120_000)
    page.evaluate("document.getElementById('race-form').scrollIntoView()")
    page.click("#replay")
    pictures = list[Picture]()
    while "Replay" in page.inner_text("#race-status"):
        began = time.monotonic()
        whole = photograph(page)
        pictures.append(Picture(whole, time.monotonic() - began))
    pictures.append(Picture(photograph(page), HOLD))
    return pictures


def photograph(page: Page) -> Image.Image:
    """The window, smaller."""
    whole = Image.open(io.BytesIO(page.screenshot()))
    size = int(whole.width * SHRINK), int(whole.height * SHRINK)
    return whole.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def write(pictures: list[Picture], file: Path) -> None:
    """An animation that is repeated for ever, as fast as the page was."""
    times = [int(1000 * picture.seconds) for picture in pictures]
    first, *others = [picture.image for picture in pictures]
    first.save(
        file, save_all=True, append_images=others, duration=times, loop=0, quality=60, method=6
    )
    assert file.stat().st_size <= MOST_BYTES, f"{file}: {file.stat().st_size} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER)
    output = parser.parse_args().output
    process, url = serve()
    try:
        with sync_playwright() as playwright:
            how: dict[str, Any] = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
            browser = playwright.chromium.launch(**how)
            for scheme in ("light", "dark"):
                window = {"width": WIDTH, "height": HEIGHT}
                page = browser.new_page(viewport=window, color_scheme=scheme)
                write(race(page, url), output / f"race-{scheme}.webp")
                page.close()
            browser.close()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
