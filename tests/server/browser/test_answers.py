"""Code in an answer: Markdown's marks of it become elements, all else stays text."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from serving import Running

pytestmark = pytest.mark.browser

Open = Callable[..., Any]

# Build an answer of pieces of `size` characters, every third one a draft's; describe its nodes.
BUILD = """async ([text, size, ends]) => {
  const { Answer } = await import("./ui/answer.js");
  const node = document.createElement("div");
  const answer = new Answer(node);
  const letters = [...text];
  for (let at = 0; at < letters.length; at += size) {
    answer.append([{ text: letters.slice(at, at + size).join(""), place: at % 3, source: "head" }]);
  }
  if (ends) answer.end();
  const parts = [];
  for (const child of node.childNodes) {
    const text = child.textContent;
    const kind = { PRE: "block", CODE: "inline" }[child.nodeName];
    if (kind) parts.push([kind, text, child.dataset.language ?? ""]);
    else if (typeof parts.at(-1) === "string") parts.push(parts.pop() + text);
    else parts.push(text);
  }
  const names = new Set([...node.querySelectorAll("*")].map((each) => each.nodeName));
  return [parts, [...names].filter((name) => !["PRE", "CODE", "SPAN"].includes(name))];
}"""
HOSTILE = "<img src=x onerror=alert(1)><script>alert(1)</script>"

ANSWERS = [
    ("no code", ["no code"]),
    ("a\n```python\nif x:\n    y\n```\nb", ["a\n", ["block", "if x:\n    y\n", "python"], "b"]),
    ("```\nx\n```", [["block", "x\n", ""]]),
    ("```\n\tx", [["block", "\tx", ""]]),
    ("```js", [["block", "", "js"]]),
    ("~~~ sh\n```\n~~~\n", [["block", "```\n", "sh"]]),
    ("````md\n```\nx\n```\n````\n", [["block", "```\nx\n```\n", "md"]]),
    ("```\nx\n`````  \ny", [["block", "x\n", ""], "y"]),
    ("```\nx\n``` y\n", [["block", "x\n``` y\n", ""]]),
    ("```\r\nx\r\n```\r\ny", [["block", "x\r\n", ""], "y"]),
    ("1. do\n   ```sh\n   ls\n   ```\n2.", ["1. do\n", ["block", "   ls\n", "sh"], "2."]),
    ("```\na\n```\n```\nb\n```", [["block", "a\n", ""], ["block", "b\n", ""]]),
    ("```\n\n\n```\n", [["block", "\n\n", ""]]),
    ("``` a `", ["``` a `"]),
    ("```" + "x" * 81 + "\ny", ["```" + "x" * 81 + "\ny"]),
    ("`", ["`"]),
    ("    \n  ", ["    \n  "]),
    ("`x` or ``a ` b``, \n`y`", [["inline", "x", ""], " or ", ["inline", "a ` b", ""], ", \n",
                                ["inline", "y", ""]]),
    ("it`s a\nline`s end", ["it`s a\nline`s end"]),
    ("a ``b` c", ["a ``b` c"]),
    ("use ```x``` now", ["use ", ["inline", "x", ""], " now"]),
    (HOSTILE, [HOSTILE]),
    (f"`{HOSTILE}`", [["inline", HOSTILE, ""]]),
    (f"```{HOSTILE}\n{HOSTILE}\n```\n{HOSTILE}",
     [["block", f"{HOSTILE}\n", HOSTILE], HOSTILE]),
    ("```\u4f60\n\U0001f600`", [["block", "\U0001f600`", "\u4f60"]]),
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(running: Running, browser: Any) -> Any:
    """A page to build answers in."""
    page = browser.new_page()
    page.goto(running.url)
    yield page
    page.close()


@pytest.mark.parametrize(("text", "parts"), ANSWERS)
def test_code(plain: Any, text: str, parts: list[Any]) -> None:
    """However the text is cut into pieces, the parts are the same; nothing is read as markup."""
    for size in {1, 2, 3, 5, len(text)}:
        assert plain.evaluate(BUILD, [text, size, True]) == [parts, []], size


def test_a_block_is_shown_while_it_comes(plain: Any) -> None:
    opened = "a\n```py\nx =", "a\n```py\nx = 1\n``"
    for text, code in zip(opened, ("x =", "x = 1\n"), strict=True):
        parts, _ = plain.evaluate(BUILD, [text, 2, False])
        assert parts == ["a\n", ["block", code, "py"]]
    assert plain.evaluate(BUILD, ["a\n``", 2, False])[0] == ["a\n"], "it may become a fence"
    assert plain.evaluate(BUILD, ["a\n``b", 2, False])[0] == ["a\n``b"]


def test_code_in_the_chat(running: Running, opened: Open, shot: Callable[[Any, str], None]) -> None:
    """Tints stay in a block; the conversation goes on with the text as the model wrote it."""
    page = opened(running.url)
    text = "So:\n\n```python\ndef f(x):\n    return x  # long" + " long" * 60 + "\n```\nUse `f`."
    sent = list[Any]()

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        pieces = [{"text": text[at : at + 4], "place": at // 4 % 4, "source": "head"}
                  for at in range(0, len(text), 4)]  # fmt: skip
        drafts = {"tokens": 9, "rounds": 3, "drafted": 9, "accepted": 6, "forwards": 3}
        events = [
            {"choices": [{"delta": {"content": piece["text"]},
                          "peagle_drafts": drafts | {"pieces": [piece]}}]}
            for piece in pieces
        ]  # fmt: skip
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        body = "".join([*lines, "data: [DONE]\n\n"])
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    for _ in range(2):
        page.get_by_label("Message").fill("Write f.")
        page.keyboard.press("Enter")
        page.locator("#log:not([aria-busy])").wait_for()
    assert sent[1]["messages"][1] == {"role": "assistant", "content": text}
    said = page.locator(".message.assistant .words").first
    assert "`" not in str(said.text_content())
    block = said.locator("pre > code")
    assert str(block.text_content()).startswith("def f(x):\n    return x  # long")
    assert block.locator(".token.p3").count() > 0
    assert said.locator("code").last.text_content() == "f"
    style = "e => [getComputedStyle(e).fontFamily, getComputedStyle(e).whiteSpace]"
    family, white_space = block.evaluate(style)
    assert "monospace" in family and white_space == "pre"
    scrolls = "e => e.scrollWidth > e.clientWidth"
    assert said.locator("pre").evaluate(scrolls), "a long line scrolls inside its block"
    shot(page, "code")
