"""Steps in the console that several tests take."""

from typing import Any

TABS = ("Chat", "Race", "Live", "Catalog")


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def ask(page: Any, text: str, tokens: int = 40) -> str:
    """Send a message by the keyboard, and wait for its answer."""
    tab(page, "Chat")
    page.get_by_label("Max tokens").fill(str(tokens))
    before = page.locator(".message.assistant").count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".message.assistant .words").nth(before)
    answer.wait_for()
    page.locator("#log:not([aria-busy])").wait_for()
    return str(answer.text_content())
