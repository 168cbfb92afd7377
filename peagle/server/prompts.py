"""Conversations and demanded tool calls, as the target reads and writes them."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Message, Style, render, to_messages
from peagle.engine.grammars import in_lark
from peagle.engine.llm import LLM
from peagle.errors import InputError
from peagle.model.template import answer_template, check_template, check_template_args

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # Hermes and Qwen write calls between them
MAX_CALLS = 8  # demanded of one answer: a small model does not end by itself


def conversation_ids(
    llm: LLM,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    template_args: dict[str, Any],
) -> list[int]:
    """Token ids up to the beginning of the answer. Raises InputError for a conversation that the
    template refuses or that does not fit."""
    tokenizer = llm.tokenizer
    check_template(tokenizer)
    check_template_args(tokenizer, template_args, "chat_template_kwargs")
    turns = to_messages({"messages": [_with_text(i, m) for i, m in enumerate(messages)]})
    text = render(tokenizer, turns, answer=True, style=Style(tools or None, template_args))
    llm.check_text(text, "messages")
    return llm.prompt_ids(tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_text(index: int, message: dict[str, Any]) -> Message:
    """The message with its parts joined into one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            why = f"has a part of type {kind!r}, which is not supported"
            raise InputError(why, field=f"messages[{index}]", fix="send parts of type 'text'")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def call_grammar(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]], several: bool
) -> str:
    """A Lark grammar of calls of these tools as the target writes them, and nothing else;
    `several`: up to MAX_CALLS calls instead of one.

    Raises InputError where the target's format of calls is unknown.
    """
    opening, closing = _marks(tokenizer)
    more = rf' ("\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
    names = [f"call{i}" for i in range(len(tools))]
    lines = [f"start: call{more}", f"call: {opening} ({' | '.join(names)}) {closing}"]
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


def tool_name(tool: dict[str, Any], field: str) -> str:
    """The name of a tool in `field`. Raises InputError when it has none."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        why = "a tool has no name"
        fix = 'give {"function": {"name": ...}}'
        raise InputError(why, field=field, value=tool, fix=fix)
    return function["name"]


def _marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Opening and closing mark around the JSON of a call, in Lark."""
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
    raise InputError(why, field="tool_choice", fix="use 'auto' or 'none'")
