"""Long names, errors and answers, on a phone and on a desktop: nothing is wider than the window."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import Running, Serve

pytestmark = pytest.mark.browser

MODEL = "/srv/models/" + "qwen2.5-coder-0.5b-instruct-q4_k_m." * 4 + "gguf"
WORD = "no_break_anywhere_" * 30
BEYOND = """[...document.querySelectorAll("body *:not(pre *)")]
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => each.outerHTML.slice(0, 200))"""
SCROLLED = """["html", "body", "main", "#log", ".message.assistant .words"]
    .flatMap((name) => [...document.querySelectorAll(name)])
    .filter((each) => each.scrollWidth > innerWidth)
    .map((each) => each.tagName)"""


@pytest.fixture
def named(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A model with a long name, and a catalog of one."""
    head = {"hub": f"owner/{WORD}", "k": 3, "licence": WORD, "source": WORD}
    lengths = [{"dataset": WORD, "k": 3, "length": 2.5, "source": f"published: {WORD}"}]
    texts = {"licence": WORD, "hardware": WORD, "min_vllm": WORD, "note": WORD}
    heads = {"p-eagle": {**head, "acceptance": lengths}}
    file = tmp_path / "long.yaml"
    file.write_text(yaml.safe_dump({WORD: {"target": f"owner/{WORD}", "heads": heads, **texts}}))
    monkeypatch.setenv("PEAGLE_CATALOG", str(file))
    return serve(model=MODEL)


def events(*parts: object) -> str:
    """The body of a stream."""
    return "".join(f"data: {part}\n\n" for part in (*map(json.dumps, parts), "[DONE]"))


def said(text: str) -> str:
    drafts = {"tokens": 1, "rounds": 1, "drafted": 1, "accepted": 1, "forwards": 1}
    drafts |= {"pieces": [{"text": text, "place": 1, "source": "lookup"}]}
    return events({"choices": [{"delta": {"content": text}, "peagle_drafts": drafts}]})


def answered(page: Any, path: str, body: str, status: int = 200) -> None:
    """The next requests for `path` get this."""
    kind = "text/event-stream" if status == 200 else "application/json"
    page.unroute_all()
    page.route(f"**/{path}", lambda route: route.fulfill(status=status, body=body,
                                                         content_type=kind))  # fmt: skip


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(
    named: Running, opened: Callable[..., Any], complaints: list[str], width: int,
    shot: Callable[[Any, str], None],
) -> None:  # fmt: skip
    page = opened(named.url, width=width, height=844)

    def check(what: str) -> None:
        shot(page, f"wide-{width}-{what}")
        assert page.evaluate(SCROLLED) == [], what
        assert page.evaluate(BEYOND) == [], what

    def ask(body: str, status: int = 200) -> None:
        answered(page, "v1/chat/completions", body, status)
        page.get_by_label("Message").fill(WORD)
        page.keyboard.press("Enter")
        page.locator("#log:not([aria-busy])").wait_for()

    page.get_by_text(f"{MODEL} · P-EAGLE, K = 3").wait_for()
    assert page.locator("#served").get_attribute("title").startswith(MODEL)  # it is elided
    assert page.locator("h1").bounding_box()["height"] < 40, "one line"
    check("welcome")
    ask(said(f"{WORD}\n```\n{WORD}\n```\n"))
    page.get_by_role("heading", name=MODEL).wait_for()
    check("answer")
    ask(json.dumps({"error": {"message": WORD}}), 400)
    page.get_by_role("alert").wait_for()
    check("error")
    page.get_by_role("tab", name="Race").click()
    check("race")
    page.unroute_all()
    page.locator("#race-tokens").select_option("48")
    page.get_by_label("Prompt").fill("the cat sat on the mat")
    page.get_by_role("button", name="Start the race").click()
    page.locator("#verdict").wait_for()
    check("verdict")
    answered(page, "peagle/race", json.dumps({"error": {"message": WORD}}), 400)
    page.get_by_role("button", name="Start the race").click()
    page.locator("#race-status").get_by_text(WORD).wait_for()
    check("race-error")
    page.get_by_role("tab", name="Live").click()
    page.locator(".chart path.line").first.wait_for(state="attached")
    check("live")
    page.get_by_role("tab", name="Catalog").click()
    for summary in page.locator("summary").all():
        summary.click()
    check("catalog")
    assert page.locator("#entries").get_by_text(WORD).first.is_visible()
    complaints[:] = [c for c in complaints if "status of 400" not in c]
