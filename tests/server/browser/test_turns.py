"""Turns of the chat that do not go as planned: stopped, failed, cut, begun anew."""

from collections.abc import Callable
from typing import Any

import pytest
from like_vllm import WORDS, LikeVllm

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
BEGUN = "".join(WORDS[:2])


def begin(page: Any, text: str) -> None:
    """Send a message, and wait for the first words of its answer."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.locator(".message.assistant").last.get_by_text(BEGUN).wait_for()


def ended(page: Any) -> None:
    page.locator("#log:not([aria-busy])").wait_for()


def test_only_the_button_stops(like_vllm: LikeVllm, opened: Open) -> None:
    """It does whatever is in the fields; Enter waits for the answer to end."""
    page = opened(like_vllm.url)
    like_vllm.go.clear()
    begin(page, "Why?")
    for label in ("Message", "Max tokens"):
        page.get_by_label(label).fill("0")
        page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    ended(page)
    assert page.get_by_label("Message").input_value() == "0"
    page.get_by_role("button", name="Send").click()
    assert not page.get_by_label("Max tokens").evaluate("field => field.validity.valid")
    assert len(like_vllm.asked) == 1, "the number is refused, and that click sent nothing"


def test_enter_does_not_stop(like_vllm: LikeVllm, opened: Open) -> None:
    page = opened(like_vllm.url)
    like_vllm.go.clear()
    begin(page, "Why?")
    page.get_by_label("Message").fill("And then?")
    page.keyboard.press("Enter")
    like_vllm.go.set()
    ended(page)
    assert page.locator(".message.assistant .words").text_content() == "".join(WORDS)
    assert page.get_by_label("Message").input_value() == "And then?"
