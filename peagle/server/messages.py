"""Conversations of the API to token ids."""

from typing import Any

from peagle.data.chat import Message, Style, render, to_messages
from peagle.engine.llm import LLM
from peagle.errors import InputError
from peagle.model.template import check_template, check_template_args


def conversation_ids(
    llm: LLM,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    template_args: dict[str, Any],
) -> list[int]:
    """Token ids up to where the answer begins. Raises InputError for what cannot be written, and
    for what does not fit."""
    tokenizer = llm.tokenizer
    check_template(tokenizer)
    check_template_args(tokenizer, template_args, "chat_template_kwargs")
    try:
        turns = to_messages({"messages": [_text(i, m) for i, m in enumerate(messages)]})
        text = render(tokenizer, turns, answer=True, style=Style(tools or None, template_args))
        llm.check_text(text, "the conversation")
        return llm.prompt_ids(tokenizer(text, add_special_tokens=False)["input_ids"])
    except InputError as error:
        why = str(error)
        raise InputError(why if why.startswith("messages[") else f"messages: {why}") from error


def _text(index: int, message: dict[str, Any]) -> Message:
    """The message with its parts as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"{index}.content has a part of type {kind!r}: only 'text' is read")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}
