"""Conversations as the target reads and writes them: prompts, demanded tool calls, and parsers of
an answer's thoughts, text and calls, whole or as it comes.

A response template parses the whole answer (`peagle.data.chat`). Without one, thoughts
are found by their marks, and calls as Hermes and Qwen write them:
<tool_call>{"name": …}</tool_call>.
"""

import json
import re
from bisect import bisect_left
from itertools import groupby
from os.path import commonprefix
from typing import Any
from uuid import uuid4

import regex
from transformers import PreTrainedTokenizerBase

from peagle.data.chat import CALL_ID, Style, render, to_message, to_messages, whole_characters
from peagle.engine.grammars import SPACE, in_lark
from peagle.engine.llm import LLM
from peagle.errors import InputError
from peagle.model.template import check_template_args
from peagle.model.thoughts import THINKING, answer_template, find_thoughts
from peagle.server.responses import Delta, Function, StreamedCall

OPEN = "<tool_call>"  # Hermes and Qwen write calls between these
CLOSE = "</tool_call>"
CALL = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|$)", re.DOTALL)
MAX_CALLS = 8  # demanded of one answer: a small model does not end by itself
Json = dict[str, Any]  # an object of a request's body


def conversation_ids(
    llm: LLM, messages: list[Json], tools: list[Json], template_args: Json
) -> list[int]:
    """Token ids up to the beginning of the answer. Raises InputError for a conversation that the
    template refuses or that does not fit."""
    tokenizer = llm.tokenizer
    check_template_args(tokenizer, template_args, "chat_template_kwargs")
    turns = to_messages({"messages": messages})
    text = render(tokenizer, turns, answer=True, style=Style(tools or None, template_args))
    llm.check_text(text, "messages")
    return llm.prompt_ids(tokenizer(text, add_special_tokens=False)["input_ids"])


def call_grammar(
    tokenizer: PreTrainedTokenizerBase, tools: list[Json], several: bool, answer: Json | None = None
) -> str | None:
    """A Lark grammar of calls of these tools as the target writes them, or of an `answer` by this
    JSON schema, and nothing else; `several`: up to MAX_CALLS calls instead of one. None where calls
    come before what the grammar of an answer constrains (GPT-OSS).

    Raises InputError where the target's format of calls is unknown.
    """
    fields = (answer_template(tokenizer) or {}).get("fields", {})
    if answer is not None and {"open", "open_pattern"} & fields.get("content", {}).keys():
        return None
    opening, closing = _marks(tokenizer, "tool_choice" if answer is None else "response_format")
    more = rf' ("\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
    names = [f"call{i}" for i in range(len(tools))]
    lines = [f"start: call{more}", f"call: {opening} ({' | '.join(names)}) {closing}"]
    if answer is not None:
        free = {"x-guidance": {"whitespace_pattern": SPACE}} | answer
        lines[0] = f"start: answer | call{more}\nanswer: %json {json.dumps(free)}"
    for rule, tool in zip(names, tools, strict=True):
        name = tool_name(tool, "tools")
        schema = tool["function"].get("parameters") or {}
        if not isinstance(schema, dict):
            why = f"the parameters of {name} are {repr(schema)[:60]}"
            raise InputError(why, field="tools", fix="give a JSON schema")
        # Spaces as in training data: the target finds them likely.
        style = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        schema = {"type": "object", "x-guidance": style} | schema
        before = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines.append(f'{rule}: {before} {rule}_arguments "}}"')
        lines.append(f"{rule}_arguments: %json {json.dumps(schema)}")
    return "\n".join(lines)


def tool_name(tool: Json, field: str) -> str:
    """The name of a tool in `field`. Raises InputError when it has none."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        why = "a tool has no name"
        raise InputError(why, field=field, value=tool, fix='give {"function": {"name": ...}}')
    return function["name"]


def _marks(tokenizer: PreTrainedTokenizerBase, field: str) -> tuple[str, str]:
    """Opening and closing mark around the JSON of a call, in Lark. Raises InputError of `field`
    where they are unknown."""
    template = answer_template(tokenizer)
    if template is None:
        written = str(getattr(tokenizer, "chat_template", ""))
        if OPEN in written and "<function=" not in written:  # Qwen's coders write no JSON
            return in_lark(tokenizer, OPEN + "\n"), in_lark(tokenizer, "\n" + CLOSE)
    else:
        call = template.get("fields", {}).get("tool_calls", {})
        whole = call.get("transform", {}).get("function") == "{content}"
        if call.get("content") == "json" and whole and "open" in call and "close" in call:
            return in_lark(tokenizer, call["open"]), in_lark(tokenizer, call["close"])
    why = "the format in which this target writes tool calls is unknown"
    fix = "use 'auto' or 'none'" if field == "tool_choice" else "leave out it or the tools"
    raise InputError(why, field=field, fix=fix)


class ThoughtParser:
    """Separates the thoughts of one answer from the rest of its text, as it comes; once it has
    ended, where the marks of thoughts have no text. White space around thoughts is dropped. An
    answer that a response template parses has no thoughts here."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        thoughts = find_thoughts(tokenizer)
        stage = "after"
        marks = ("", "")
        if thoughts is not None and thoughts.marks is not None:
            stage = thoughts.stage(tokenizer, prompt)
            marks = thoughts.marks
        opening = "" if stage == "inside" else regex.escape(marks[0].strip())
        self._opening = regex.compile(rf"\s*{opening}\s*")
        self._closing = regex.compile(rf"\s*{regex.escape(marks[1])}\s*")
        spelled = self._tokenizer.encode(marks[1], add_special_tokens=False).ids
        self._hidden = marks[1] not in self._tokenizer.decode(spelled)
        self._begun = False
        self._over = stage == "after"
        self._held = ""
        self.length = 0  # number of tokens of the thoughts, where their marks are hidden

    def push(self, text: str, output: list[int] | None = None) -> tuple[str, str]:
        """Add text; returns the certain text of the thoughts, and of the rest. `output` are the
        tokens of an answer that has ended."""
        self._held += text
        ended = output is not None
        thoughts = rest = ""
        if self._hidden and not self._over:
            return self._split(output) if output is not None else ("", "")
        if not self._begun and not self._over:
            self._begin(ended)
        if self._begun and not self._over:
            thoughts = self._think(ended)
        if self._over:
            rest = self._held
            self._held = ""
        return thoughts, rest

    def _begin(self, ended: bool) -> None:
        """Take the mark that begins thoughts, once it is known whether the answer has it."""
        mark = self._opening.match(self._held, partial=not ended)
        if mark is None:
            self._over = True
        elif ended or mark.end() < len(self._held):
            self._begun = True
            self._held = self._held[mark.end() :]

    def _think(self, ended: bool) -> str:
        """Take the thoughts, and the mark that ends them."""
        mark = self._closing.search(self._held, partial=not ended)
        thoughts = self._held if mark is None else self._held[: mark.start()]
        self._over = mark is not None and (ended or mark.end() < len(self._held))
        self._held = self._held[mark.end() if mark and self._over else len(thoughts) :]
        return thoughts.rstrip() if ended else thoughts

    def _split(self, output: list[int]) -> tuple[str, str]:
        """Separate both by the tokens of the answer."""

        def shown(count: int) -> str:
            return self._tokenizer.decode(output[:count], skip_special_tokens=False)

        if not self._opening.match(shown(len(output))):
            return "", self._held
        self.length = bisect_left(
            range(len(output)), True, key=lambda count: bool(self._closing.search(shown(count)))
        )
        thoughts = commonprefix([self._held, self._tokenizer.decode(output[: self.length])])
        return thoughts.strip(), self._held.removeprefix(thoughts).lstrip()


class AnswerParser:
    """Parses one answer as it comes. Calls, and text that may become one, are held back; so is the
    whole answer where a response template parses it, or where the marks of calls have no text.

    `max_calls`: how many are taken; None: any number, 0: none, as no tools were offered."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], max_calls: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._max_calls = max_calls
        self._thoughts = ThoughtParser(tokenizer, prompt)
        template = answer_template(tokenizer)
        fields = (template or {}).get("fields", {})
        self._plain = max_calls == 0 and not any(name in fields for name in THINKING)
        self._by_template = template is not None
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        self._hidden = {i: t.content for i, t in added if t.special and t.content in (OPEN, CLOSE)}
        self._held = ""

    def push(self, text: str, output: list[int] | None = None) -> Delta:
        """Add text; returns what is certain now. `output` are the tokens of an answer that has
        ended."""
        thoughts, text = self._thoughts.push(text, output)
        if not self._plain:
            self._held += text
            text = self._before_calls()
        if self._plain or output is None:
            return Delta(content=text or None, reasoning=thoughts)
        delta = self._finish(output[self._thoughts.length :])
        delta.content = text + (delta.content or "") or None
        delta.reasoning = thoughts + delta.reasoning
        delta.tool_calls = delta.tool_calls[: self._max_calls]
        return delta

    def _before_calls(self) -> str:
        """Take the text that is certainly no call."""
        if self._by_template or self._hidden:
            return ""
        call = regex.search(regex.escape(OPEN), self._held, partial=True)
        at = len(self._held) if call is None else call.start()
        certain = self._held[:at]
        self._held = self._held[at:]
        return certain

    def _finish(self, answer: list[int]) -> Delta:
        """Parse the text that was held back, once the answer has ended."""
        if self._by_template:
            message = to_message(self._tokenizer, self._prompt, answer, self._held)
            named = message.get("tool_calls") or []
            found = [_tool_call(i, call.get("function", call)) for i, call in enumerate(named)]
            calls = [call for call in found if call is not None]
            if len(calls) < len(found):
                return Delta(content=self._held)
            reasoning = message.get("thinking") or message.get("reasoning_content") or ""
            return Delta(content=message["content"], reasoning=reasoning, tool_calls=calls)
        text = self._with_marks(answer) if self._hidden else self._held
        found = [_tool_call(i, _from_json(body)) for i, body in enumerate(CALL.findall(text))]
        if found[-1:] == [None] and text.rfind(OPEN) > text.rfind(CLOSE):
            found.pop()  # the answer was cut in the midst of a call: those before it are whole
        calls = [call for call in found if call is not None]
        if not calls or len(calls) < len(found):
            return Delta(content=self._held)  # broken calls stay text
        return Delta(content=CALL.sub("", text).strip(), tool_calls=calls)

    def _with_marks(self, answer: list[int]) -> str:
        """The text of an answer with the marks that decoding leaves out."""
        runs = groupby(answer, self._hidden.get)
        decode = self._tokenizer.backend_tokenizer.decode
        return "".join(mark or decode(list(ids)) for mark, ids in runs)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _tool_call(index: int, function: Any) -> StreamedCall | None:
    """A call with a new id of a form that every template takes; None for anything but a function's
    name and arguments that are JSON."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):  # their JSON, as clients have it
        arguments = _from_json(arguments.strip() or "{}")
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # Python reads NaN, which is no JSON
        return None
    made = Function(name=whole_characters(function["name"]), arguments=whole_characters(written))
    return StreamedCall(index=index, id=uuid4().hex[: len(CALL_ID)], function=made)
