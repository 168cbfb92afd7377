"""Turns of the chat that do not go as planned: stopped, failed, cut, begun anew."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from like_vllm import WORDS, LikeVllm
from serving import until
from test_widths import answered, events

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


def drafted(text: str, content: str, trees: Iterable[object] = ()) -> dict[str, Any]:
    """An event with `text`, of which the answer has `content`."""
    drafts = {"tokens": 2, "rounds": 1, "drafted": 1, "accepted": 1, "forwards": 1}
    drafts |= {"pieces": [{"text": text, "place": 0, "source": "target"}], "trees": [*trees]}
    return {"choices": [{"delta": {"content": content}, "peagle_drafts": drafts}]}


def test_thinking_is_measured(like_vllm: LikeVllm, opened: Open) -> None:
    """It is no content, but its tokens are tokens, and drafts come after them."""
    page = opened(like_vllm.url)
    tree = {"before": "m", "nodes": ["?"], "parents": [0], "chances": [0.5], "accepted": [1],
            "after": "", "matched": 0, "looked_up": []}  # fmt: skip
    answered(page, "v1/chat/completions", events(drafted("Hm", ""), drafted("?", "", [tree])))
    page.get_by_label("Message").fill("Why?")
    page.keyboard.press("Enter")
    page.locator("details.drafts summary").click()
    assert page.locator(".drafts code").inner_text() == "Hm"
    assert page.locator("#ttft").inner_text().endswith("s")


def asked_next(like_vllm: LikeVllm, page: Any) -> list[tuple[str, str]]:
    """The conversation of the next request, as (role, content)."""
    page.unroute_all()
    page.get_by_label("Message").fill("Next")
    page.keyboard.press("Enter")
    page.locator(".message.assistant").last.get_by_text("".join(WORDS)).wait_for()
    ended(page)
    return [(turn["role"], turn["content"]) for turn in like_vllm.asked[-1]["messages"]]


def test_a_stopped_turn_is_said(like_vllm: LikeVllm, opened: Open) -> None:
    page = opened(like_vllm.url)
    like_vllm.go.clear()
    begin(page, "Why?")
    page.get_by_role("button", name="Stop").click()
    ended(page)
    like_vllm.go.set()
    turn = [("user", "Why?"), ("assistant", BEGUN)]
    assert asked_next(like_vllm, page) == [*turn, ("user", "Next")]


@pytest.mark.parametrize("begun", [True, False])
def test_a_failed_turn(like_vllm: LikeVllm, opened: Open, begun: bool) -> None:
    """The conversation has what was said before the error. A question without an answer is not part
    of it, and stands in the field again."""
    page = opened(like_vllm.url)
    said = [{"choices": [{"delta": {"content": BEGUN}}]}] if begun else []
    answered(page, "v1/chat/completions", events(*said, {"error": {"message": "too late"}}))
    page.get_by_label("Message").fill("Why?")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("too late").wait_for()
    ended(page)
    assert page.get_by_label("Message").input_value() == ("" if begun else "Why?")
    assert page.get_by_text("Not part of the conversation").count() == (0 if begun else 1)
    turn = [("user", "Why?"), ("assistant", BEGUN)] if begun else []
    assert asked_next(like_vllm, page) == [*turn, ("user", "Next")]


@pytest.mark.parametrize(
    ("reason", "told"), [("length", "cut at Max tokens"), ("abort", "ended by the server")]
)
def test_a_cut_answer_says_so(like_vllm: LikeVllm, opened: Open, reason: str, told: str) -> None:
    like_vllm.reason = reason
    page = opened(like_vllm.url)
    asked_next(like_vllm, page)
    assert page.locator(".figures").inner_text() == told


def test_a_stream_without_its_end(like_vllm: LikeVllm, opened: Open) -> None:
    page = opened(like_vllm.url)
    body = events(drafted(BEGUN, BEGUN)).removesuffix("data: [DONE]\n\n")
    answered(page, "v1/chat/completions", body)
    begin(page, "Why?")
    page.get_by_role("alert").get_by_text("before the answer did").wait_for()


def test_a_new_chat_has_no_old_turns(like_vllm: LikeVllm, opened: Open) -> None:
    """Begun after the last word, while the acceptance length is read from /metrics."""
    page, held = opened(like_vllm.url), list[Any]()

    def hold(route: Any) -> None:
        held.append(route)

    like_vllm.go.clear()
    begin(page, "Why?")
    page.route("**/metrics", hold)
    like_vllm.go.set()
    page.locator(".message.assistant").get_by_text("".join(WORDS)).wait_for()
    until(lambda: page.wait_for_timeout(50) or len(held) == 2)  # the charts' request, too
    page.get_by_role("button", name="New chat").click()
    for route in held:
        route.continue_()
    ended(page)
    assert page.locator("#al").inner_text() == "–"
    assert asked_next(like_vllm, page) == [("user", "Next")]
