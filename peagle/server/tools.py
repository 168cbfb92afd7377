"""The parts of an answer: text, tool calls, reasoning.

Where it is known how the model marks them (`peagle.data.response_parser`) the whole answer is
parsed; else calls are looked for as Hermes and Qwen write them: <tool_call>{"name": …}</tool_call>.
"""

import json
import re
from itertools import groupby
from typing import Any, NamedTuple
from uuid import uuid4

import regex
from transformers import PreTrainedTokenizerBase

from peagle.data.response_parser import to_message
from peagle.engine.grammars import in_lark
from peagle.errors import InputError, shortened
from peagle.model.thoughts import answer_template

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 8  # demanded of one answer: a small model does not end by itself
CALL = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|$)", re.DOTALL)


class ParsedAnswer(NamedTuple):
    """An answer in its parts."""

    text: str
    calls: list[dict[str, Any]]  # OpenAI's; none: all is text
    reasoning: str = ""


def call_grammar(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]], several: bool
) -> str:
    """Lark, for llguidance: calls of these tools as the target writes them, and nothing else;
    `several` where there may be more than one, up to MAX_CALLS.

    Raises InputError where it is not known how the target writes them.
    """
    opening, closing = _marks(tokenizer)
    more = rf' ("\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
    lines = [f"start: call{more}"]
    names = [f"call{i}" for i in range(len(tools))]
    lines.append(f"call: {opening} ({' | '.join(names)}) {closing}")
    for rule, tool in zip(names, tools, strict=True):
        name, schema = named(tool), tool["function"].get("parameters") or {}
        if not isinstance(schema, dict):
            raise InputError(
                f"tools: the parameters of {name} are {repr(schema)[:60]}, give a JSON schema"
            )
        # Spaces as in training data: that is what the target finds likely.
        style = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        schema = {"type": "object", "x-guidance": style} | schema
        before = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines.append(f'{rule}: {before} {rule}_arguments "}}"')
        lines.append(f"{rule}_arguments: %json {json.dumps(schema)}")
    return "\n".join(lines)


def named(tool: dict[str, Any], field: str = "tools") -> str:
    """The name of a tool in `field`. Raises InputError when it has none."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        given = shortened(json.dumps(tool))
        raise InputError(f'{field} {given}: a tool has {{"function": {{"name": ...}}}}, give one')
    return function["name"]


def _marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What is before and after the JSON of a call, in Lark."""
    template = answer_template(tokenizer)
    if template is None:
        written = str(getattr(tokenizer, "chat_template", ""))
        if OPEN in written and "<function=" not in written:  # Qwen's coders write that, no JSON
            return in_lark(tokenizer, OPEN + "\n"), in_lark(tokenizer, "\n" + CLOSE)
    else:
        call = template.get("fields", {}).get("tool_calls", {})
        whole = call.get("transform", {}).get("function") == "{content}"
        if call.get("content") == "json" and whole and "open" in call and "close" in call:
            return in_lark(tokenizer, call["open"]), in_lark(tokenizer, call["close"])
    raise InputError(
        "tool_choice: how this target writes tool calls is not known to us, only 'auto' or 'none' "
        "can be had"
    )


class ResponseParser:
    """Parses one answer as it comes: calls, and what may become one, are held back. All is held
    back where a response template parses it, or where the marks of calls have no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._parses = answer_template(tokenizer) is not None
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        self._hidden = {i: t.content for i, t in added if t.special and t.content in (OPEN, CLOSE)}
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns what is no call for certain."""
        self._held += text
        if self._parses or self._hidden:
            return ""
        call = regex.search(regex.escape(OPEN), self._held, partial=True)
        at = len(self._held) if call is None else call.start()
        certain, self._held = self._held[:at], self._held[at:]
        return certain

    def finish(self, prompt: list[int], answer: list[int]) -> ParsedAnswer:
        """Parse what was held back, once the answer has ended."""
        if self._parses:
            return _parsed(self._tokenizer, prompt, answer, self._held)
        text = self._with_marks(answer) if self._hidden else self._held
        found = [_call(body) for body in CALL.findall(text)]
        if found[-1:] == [None] and text.rfind(OPEN) > text.rfind(CLOSE):
            found.pop()  # the answer was cut in the midst of a call: those before it are whole
        calls = [call for call in found if call is not None]
        if not calls or len(calls) < len(found):
            return ParsedAnswer(self._held, [])  # nothing is lost of what is no call
        return ParsedAnswer(CALL.sub("", text).strip(), calls)

    def _with_marks(self, answer: list[int]) -> str:
        """The text of an answer with the marks that decoding leaves out."""
        runs = groupby(answer, self._hidden.get)
        decode = self._tokenizer.backend_tokenizer.decode
        return "".join(mark or decode(list(ids)) for mark, ids in runs)


def _parsed(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: list[int], text: str
) -> ParsedAnswer:
    message = to_message(tokenizer, prompt, answer, text)
    calls = [_call_of(call.get("function", call)) for call in message.get("tool_calls") or []]
    reasoning = message.get("thinking") or message.get("reasoning_content") or ""
    return ParsedAnswer(message["content"], [call for call in calls if call is not None], reasoning)


def _call(body: str) -> dict[str, Any] | None:
    try:
        return _call_of(json.loads(body))
    except ValueError:
        return None


def _call_of(function: Any) -> dict[str, Any] | None:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": function["name"], "arguments": arguments}
    return {"id": f"call-{uuid4().hex}", "type": "function", "function": function}
