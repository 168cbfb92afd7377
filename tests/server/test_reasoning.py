"""Thoughts come as `reasoning`, whole and streamed, and a form is the answer's."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from serving import Serve, ended_request
from thinking import OTHER, QWEN3, R1, byte_fallback, byte_level, ids, say, thinking_target
from tiny import CHATML

from peagle.backends.batch import BLOCK
from peagle.data.chat import Style, prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.text import TextStream
from peagle.server.answers import ChatBuilder

ASKED: Any = [{"role": "user", "content": "the <think> cat"}]
CALL = '<tool_call>\n{"name": "sit", "arguments": {"on": "mat"}}\n</tool_call>'
both = pytest.mark.parametrize("make", [byte_level, byte_fallback])
styles = pytest.mark.parametrize("stream", [False, True])


def parse(
    tokenizer: Any,
    answer: str,
    *,
    stream: bool,
    calls: int | None = 0,
    stop: tuple[str, ...] = (),
    **args: Any,
) -> tuple[str, str, Any]:
    """Reasoning, content, and the rest of a choice, of an answer that comes token by token."""
    prompt = prompt_ids(tokenizer, ASKED, Style(None, args))
    output = ids(tokenizer, answer)
    text, pieces = TextStream(tokenizer, stop), list[str]()
    for token in output:
        piece, stopped = text.push(token)
        pieces.append(piece)
        if stopped:
            break
    pieces.append(text.finish())
    form = ChatBuilder(tokenizer, calls, ended_request(text.text, prompt, output))
    if not stream:
        message = form.whole().message
        return message.reasoning, message.content, message.tool_calls
    deltas = [form.part(piece, [], ended=False).delta for piece in pieces]
    deltas.append(form.part("", [], ended=True).delta)
    reasoning = "".join(delta.reasoning for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    return reasoning, content, deltas[-1].tool_calls


@styles
@pytest.mark.parametrize("marks", ["added", "special", "text"])
@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nit <think> sat</think>!", "hm\n\nso", None),
        ("\n<think>hm</think>", "hm", ""),
        ("<think>\n\n</think>\n\nit sat", "", "it sat"),
        ("<think>\nhm, </th", "hm, </th", ""),
        ("<think>\n", "", ""),
        ("it sat\n", "", "it sat\n"),
        ("<thi", "", "<thi"),
        ("<thinking>", "", "<thinking>"),
    ],
)
@both
def test_thoughts_are_apart(
    make: Callable[..., Any], answer: str, reasoning: str, content: Any, marks: str, stream: bool
) -> None:
    tokenizer = make(marks)
    if content is None:
        content = "it  sat!" if marks == "special" else "it <think> sat</think>!"
    found = parse(tokenizer, answer, stream=stream)
    assert found[:2] == (reasoning, content)


@styles
@pytest.mark.parametrize("marks", ["added", "special", "text"])
def test_what_the_prompt_began(marks: str, stream: bool) -> None:
    """R1's prompts begin the thoughts; Qwen3's end them where they are disabled."""
    tokenizer = byte_level(marks)
    off = parse(tokenizer, "it</think> sat", stream=stream, enable_thinking=False)
    assert off[:2] == ("", "it sat" if marks == "special" else "it</think> sat")
    tokenizer.chat_template = R1
    assert parse(tokenizer, "\nhm\n</think>\n\nit sat", stream=stream)[:2] == ("hm", "it sat")
    assert parse(tokenizer, "hm", stream=stream)[:2] == ("hm", "")


@styles
def test_marks_that_only_the_template_knows(stream: bool) -> None:
    tokenizer = byte_level(template=OTHER)
    answer = "<|hm|>\n<think>\n<|so|>it sat"
    assert parse(tokenizer, answer, stream=stream)[:2] == ("<think>", "it sat")
    tokenizer.chat_template = CHATML
    assert parse(tokenizer, "<think>a</think>b", stream=stream)[1] == "<think>a</think>b"


@styles
@pytest.mark.parametrize("marks", ["added", "special", "text"])
def test_calls_after_thoughts(marks: str, stream: bool) -> None:
    """A call that is thought of is none."""
    tokenizer = byte_level(marks)
    answer = f"<think>\n{CALL}?\n</think>\n\nok {CALL}"
    reasoning, content, calls = parse(tokenizer, answer, stream=stream, calls=None)
    assert (reasoning, content.strip()) == (f"{CALL}?", "ok")
    assert [call.function.name for call in calls] == ["sit"]


@styles
@pytest.mark.parametrize("marks", ["added", "special", "text"])
def test_a_stop_among_thoughts(marks: str, stream: bool) -> None:
    tokenizer = byte_level(marks)
    found = parse(tokenizer, "<think>\nhm so</think>it sat", stream=stream, stop=("so",))
    assert found[:2] == ("hm", "")
    found = parse(tokenizer, "<think>\nhm so</think>it sat", stream=stream, stop=("sa",))
    assert found[:2] == ("hm so", "it ")


def test_an_answer_that_is_sent_back_keeps_its_thoughts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt begins with the tokens of the turn before, so the cache has them."""
    tokenizer = byte_level(template=QWEN3.replace(" and loop.last", ""))
    thoughts = " ".join(["hm so"] * BLOCK)
    answer = ids(tokenizer, f"<think>\n{thoughts}\n</think>\n\nit sat<|im_end|>")
    say(monkeypatch, answer)
    running = serve(LLM(thinking_target(tokenizer), max_batch=2, kv_tokens=512))
    first = running.chat(ASKED, max_tokens=len(answer))
    message = first.choices[0].message
    assert (message.reasoning, message.content) == (thoughts, "it sat")
    talk = [*ASKED, message.model_dump(), {"role": "user", "content": "and then"}]
    again = running.chat(talk, max_tokens=1).usage
    spoken = first.usage.prompt_tokens + len(answer)
    assert again.prompt_tokens > spoken
    assert again.prompt_tokens_details.cached_tokens >= spoken // BLOCK * BLOCK - BLOCK


def test_thoughts_come_as_they_are_thought() -> None:
    tokenizer = byte_level()
    form = ChatBuilder(tokenizer, 0, ended_request(prompt=prompt_ids(tokenizer, ASKED)))
    pieces = ["<think>", "hm", " so", " ", "</think>", "\n", "it", " sat"]
    deltas = [form.part(piece, [], ended=False).delta for piece in pieces]
    assert [delta.reasoning for delta in deltas[1:4]] == ["hm", " so", ""]
    assert [delta.content for delta in deltas[5:]] == [None, "it", " sat"]


FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}


@styles
@pytest.mark.parametrize("template", [QWEN3, R1])
def test_a_form_is_the_answers(
    serve: Serve, template: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level(template=template)
    begun = "" if template is R1 else "<think>\n"
    say(monkeypatch, ids(tokenizer, begun + 'hm {"a"} \n</think>Sure'))
    running = serve(LLM(thinking_target(tokenizer), max_batch=2, kv_tokens=512))
    for most in (60, 9):
        got = running.chat(ASKED, response_format=FORM, stream=stream, max_tokens=most)
        choices = [part.choices[0] for part in (got if stream else [got])]
        parts = [choice.delta if stream else choice.message for choice in choices]
        content = "".join(part.content or "" for part in parts)
        reasoning = "".join(getattr(part, "reasoning", None) or "" for part in parts)
        if most == 60:
            assert (reasoning, json.loads(content) in ("a", "b")) == ('hm {"a"}', True)
            assert choices[-1].finish_reason == "stop"
        else:
            assert content == "" and 'hm {"a"}'.startswith(reasoning)
            assert choices[-1].finish_reason == "length"
