"""The dialog that asks for an API key: it stays until there is a key that the server takes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from like_vllm import LikeVllm

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
STORED = "sessionStorage.getItem('peagle-api-key')"


@pytest.fixture
def asked_for_a_key(like_vllm: LikeVllm, opened: Open, complaints: list[str]) -> Iterator[Any]:
    """A page of a server with the key "secret"."""
    page = opened("about:blank")

    def check(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401)

    page.route("**/v1/*", check)
    page.goto(like_vllm.url)
    page.get_by_role("dialog").wait_for()
    yield page
    complaints[:] = [c for c in complaints if "status of 401" not in c]


def give(page: Any, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")


def test_escape_does_not_close_it(asked_for_a_key: Any) -> None:
    page = asked_for_a_key
    for _ in range(3):
        page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for()
    give(page, "secret")
    page.get_by_text("Ask other").wait_for()
    assert not page.get_by_role("dialog").is_visible()


def test_a_key_that_no_header_can_hold(asked_for_a_key: Any) -> None:
    """The browser refuses it; and what the server refuses is not kept."""
    page = asked_for_a_key
    give(page, "\u043a\u043b\u044e\u0447")
    assert not page.get_by_label("Key", exact=True).evaluate("field => field.validity.valid")
    give(page, "wrong")
    page.get_by_text("refuses this key").wait_for()
    assert page.evaluate(STORED) is None
    give(page, "secret")
    page.get_by_text("Ask other").wait_for()
    assert page.evaluate(STORED) == "secret"
