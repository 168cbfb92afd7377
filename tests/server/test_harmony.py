"""GPT-OSS's answers: what it thought stands apart from what it says, whole and streamed."""

import sys
from pathlib import Path
from typing import Any

from serving import ended_request

from peagle.data.chat import prompt_ids
from peagle.server.answers import ChatBuilder
from peagle.server.schema import ChatBody

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
from test_response_parser import ASKED, CALL, THOUGHT, TOKENIZER, ids  # noqa: E402


def request(answer: str) -> Any:
    """A request that has ended with this answer."""
    output = ids(answer)
    text = TOKENIZER.decode(output, skip_special_tokens=True)
    return ended_request(text, prompt_ids(TOKENIZER, ASKED), output)


def whole(answer: str, max_calls: int | None) -> Any:
    return ChatBuilder(TOKENIZER, max_calls, request(answer)).whole()


def test_whole() -> None:
    message = whole(THOUGHT, max_calls=0).message
    assert (message.content, message.reasoning) == ("it sat", "hm")


def test_streamed() -> None:
    ended = request(THOUGHT)
    form = ChatBuilder(TOKENIZER, 0, ended)
    assert form.part(ended.text.text, [], ended=False).delta.model_dump() == {"role": "assistant"}
    delta = form.part("", [], ended=True).delta
    assert (delta.content, delta.reasoning) == ("it sat", "hm")


def test_a_form_leaves_calls_free() -> None:
    """They come before the channel that it constrains."""
    form = {"type": "json_object"}
    tool = {"type": "function", "function": {"name": "look"}}
    body = ChatBody.model_validate({"messages": ASKED, "tools": [tool], "response_format": form})
    body.constrain_calls(TOKENIZER)
    assert body.constraint() == {"json_schema": {"type": "object"}}


def test_calls() -> None:
    choice = whole(CALL, max_calls=None)
    [call] = choice.message.tool_calls
    assert call.function.model_dump() == {"name": "look", "arguments": '{"at": "mat"}'}
    assert choice.finish_reason == "tool_calls"
