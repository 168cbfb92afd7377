"""GPT-OSS's answers: what it thought stands apart from what it says, whole and streamed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from peagle.data.chat import prompt_ids
from peagle.server.forms import ChatForm
from peagle.server.jobs import Drafting, Said

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
from test_response_parser import ASKED, CALL, THOUGHT, TOKENIZER, ids  # noqa: E402

NOTHING = cast(Drafting, None)  # is not read here


def request(answer: str) -> Any:
    """A request that has ended with this answer."""
    prompt, output = prompt_ids(TOKENIZER, ASKED), ids(answer)
    text = TOKENIZER.decode(output, skip_special_tokens=True)
    return SimpleNamespace(
        index=0, tokens=[*prompt, *output], prompt_length=len(prompt), output=output,
        text=SimpleNamespace(text=text), finish_reason="stop", logprobs=[],
        params=SimpleNamespace(logprobs=None),
    )  # fmt: skip


def test_whole() -> None:
    message = ChatForm(TOKENIZER, most_calls=0).whole(request(THOUGHT))["message"]
    assert (message["content"], message["reasoning"]) == ("it sat", "hm")


def test_streamed() -> None:
    form, ended = ChatForm(TOKENIZER, most_calls=0), request(THOUGHT)
    chunks = [SimpleNamespace(text=ended.text.text, logprob=None)]
    assert form.part(Said(0, chunks, None, NOTHING))["delta"] == {}
    delta = form.part(Said(0, [], ended, NOTHING))["delta"]
    assert (delta["content"], delta["reasoning"]) == ("it sat", "hm")


def test_calls() -> None:
    choice = ChatForm(TOKENIZER, most_calls=None).whole(request(CALL))
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "mat"}'}
    assert choice["finish_reason"] == "tool_calls"
