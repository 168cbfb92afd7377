"""Conversations as token ids with the mask of the assistant's tokens, and answers as messages."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from peagle.data.example import Example
from peagle.errors import InputError
from peagle.model.template import NO_ARGS, apply_template
from peagle.model.thoughts import THINKING, answer_template, find_thoughts

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
SYSTEM_ROLES = ("system", "developer")
ASKING = ("user", "tool")
ROLES = (*ASKING, "assistant", *SYSTEM_ROLES)
KEPT = ("tool_call_id", "name")  # templates read these too
NEEDED = "needs 'messages' (role, content) or 'conversations' (from, value)"  # of a record
ONE_OF_BOTH = "both content and thinking"  # in GPT-OSS's template: before a call it refuses both
MAX_KEPT = 2**14  # characters of tools, arguments and turns for which a template's answer is kept
CALL_ID = "call00000"  # nine letters and digits, as Mistral's template demands
Message = dict[str, Any]


class Style(NamedTuple):
    """Arguments of a chat template besides the messages."""

    tools: list[Any] | None = None  # JSON schemas of functions
    args: Mapping[str, Any] = NO_ARGS  # such as enable_thinking=False

    def in_line(self) -> dict[str, Any]:
        """Return the keys of a data file that hold it."""
        tools = {"tools": self.tools} if self.tools else {}
        return tools | ({"template_args": dict(self.args)} if self.args else {})


PLAIN_STYLE = Style()


class Conversation(NamedTuple):
    """A conversation to answer: `asks[i]` are the messages that lead to the i-th answer."""

    asks: list[list[Message]]
    style: Style = PLAIN_STYLE


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], style: Style = PLAIN_STYLE
) -> list[int]:
    """Return token ids up to where the assistant's answer begins. Raises InputError as `render`
    does, or by `check_text`."""
    check_text([messages, style])
    text = render(tokenizer, messages, answer=True, style=style)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    *,
    answer: bool,
    style: Style = PLAIN_STYLE,
) -> str:
    """Return the conversation as text; with `answer`, the opening of the assistant's turn follows.
    A developer is the system where the template does not know one.

    Raises InputError when the tokenizer has no chat template, or the template refuses, or leaves
    out a turn.
    """
    template = str(tokenizer.chat_template)
    known = {} if "developer" in template else {"developer": "system"}
    given = [{**turn, "role": known.get(turn["role"], turn["role"])} for turn in messages]
    if ONE_OF_BOTH in template:
        given = list(map(_without_thoughts, given))
    text = apply_template(tokenizer, given, answer=answer, tools=style.tools, args=style.args)
    turns = tuple((turn["role"], len(turn.get("tool_calls") or ())) for turn in given)
    how = json.dumps({"tools": style.tools, "args": dict(style.args)}, default=str)
    find = _left_out if len(how) + len(str(turns)) < MAX_KEPT else _left_out.__wrapped__
    lost = find(tokenizer, template, turns, answer, how)
    if lost is not None:
        why = "the chat template leaves out this turn, or a call in it"
        role = messages[lost]["role"]
        raise InputError(why, field=f"messages[{lost}]", value=role, fix="put it into another turn")
    return text


def _without_thoughts(turn: Message) -> Message:
    """The turn, without its thoughts where it has both a text and calls."""
    both = turn["content"] and turn.get("tool_calls")
    return {key: value for key, value in turn.items() if not (both and key in THINKING)}


@lru_cache(1024)
def _left_out(
    tokenizer: PreTrainedTokenizerBase,
    _template: str,  # the tokenizer's may change
    turns: tuple[tuple[str, int], ...],  # role, and number of tool calls
    answer: bool,
    style: str,  # JSON of tools and args
) -> int | None:
    """The first turn that the template leaves out, as a whole or a call in it, tried with invented
    words. None where there is no such turn, or the template refuses the words."""
    messages: list[Message] = []
    words: list[list[str]] = []
    for number, (role, count) in enumerate(turns):
        word = f"word{number:05}"
        names = [f"{word}c{call}" for call in range(count)]
        message: Message = {"role": role, "content": "" if names else word, "tool_call_id": CALL_ID}
        if names:
            message["tool_calls"] = [{**_function(n, {}), "id": CALL_ID} for n in names]
        messages.append(message)
        words.append(names or [word])
    try:
        text = apply_template(tokenizer, messages, answer=answer, **json.loads(style)).lower()
    except InputError:
        return None
    return next((n for n, parts in enumerate(words) if not all(w in text for w in parts)), None)


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], style: Style = PLAIN_STYLE
) -> list[Example]:
    """Tokenize a conversation; the answers and their end-of-turn tokens are supervised, each as the
    target had to write it; thoughts that the template makes up are not. One document, or several
    when the template rewrites earlier answers as the conversation continues (Qwen3 drops their
    thinking).

    Raises InputError when there is no assistant turn, or an answer does not follow its prompt, or
    by `check_text`.
    """
    check_text([messages, style])
    documents: list[tuple[str, list[tuple[int, int]]]] = []  # text, first and last of each answer
    messages = _begun_by_user(tokenizer, messages, style)
    asked = False  # earlier answers are context
    for index, message in enumerate(messages):
        asked |= message["role"] in ASKING and bool(message["content"])
        if message["role"] != "assistant" or not asked:
            continue
        before = render(tokenizer, messages[:index], answer=True, style=style)
        after = render(tokenizer, messages[: index + 1], answer=False, style=style)
        if not after.startswith(before):
            why = "the chat template rewrites earlier turns: answers cannot be located"
            raise InputError(why, fix="`peagle data regenerate` gives their exact tokens")
        first = len(before) + _made_up(tokenizer, message, after[len(before) :])
        spans = [(first, len(after.rstrip()))]
        if documents and after.startswith(documents[-1][0].rstrip()):
            spans = documents.pop()[1] + spans
        documents.append((after, spans))
    if not documents:
        raise InputError("the conversation has no assistant turn to train on")
    return [_encode(tokenizer, text, spans) for text, spans in documents]


def _begun_by_user(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], style: Style
) -> list[Message]:
    """The conversation; where the template refuses an assistant's turn at the beginning, an empty
    user's turn comes first."""
    first = next((n for n, turn in enumerate(messages) if turn["role"] not in SYSTEM_ROLES), 0)
    try:
        if messages[first]["role"] == "assistant":
            render(tokenizer, messages[: first + 1], answer=False, style=style)
    except InputError:
        return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]
    return messages


def _made_up(tokenizer: PreTrainedTokenizerBase, message: Message, answer: str) -> int:
    """Characters at the beginning of an answer, as the template writes it, that are thoughts which
    the message does not have (Qwen3's empty ones)."""
    thoughts = None if any(map(message.get, THINKING)) else find_thoughts(tokenizer)
    if thoughts is None or thoughts.opening is None:
        return 0
    opening = re.escape(thoughts.opening.strip())
    empty = re.match(rf"\s*({opening})?\s*({thoughts.closing.pattern})\s*", answer)
    if empty is None or _bare(message["content"]).startswith(_bare(empty[0])):
        return 0
    return empty.end()


def _bare(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> Example:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(lo <= start < hi for lo, hi in spans) for start, _ in encoded["offset_mapping"]]
    return Example(encoded["input_ids"], inside)


def to_message(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: Sequence[int], text: str
) -> Message:
    """Return the assistant's message: thoughts, text and tool calls apart if the model marks
    them. A model without marks, or an answer that breaks its format, gives `text` as it is."""
    plain = {"role": "assistant", "content": text}
    if (template := answer_template(tokenizer)) is None:
        return plain
    try:
        parsed = tokenizer.parse_response(list(answer), template, prefix=prompt)
        # Python reads NaN, which is no JSON.
        written = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        parsed = json.loads(whole_characters(written))
    except (ValueError, KeyError, RecursionError):
        return plain
    parts = {name: value for name, value in parsed.items() if value}
    return {**plain, "content": "", **parts}


def whole_characters(text: str) -> str:
    """Return the text with U+FFFD in place of halves of characters, which JSON can escape
    (\\ud83d)."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_system(messages: list[Message], text: Any) -> list[Message]:
    """Return the messages, after a system turn of this text where they begin with none; None adds
    nothing. Raises InputError when it is no text."""
    if text is None or any(turn["role"] in SYSTEM_ROLES for turn in messages[:1]):
        return messages
    return [_message({"role": "system", "content": text}, "system"), *messages]


def to_messages(record: dict[str, Any]) -> list[Message]:
    """Read a `messages` or ShareGPT `conversations` record, which may have its system prompt beside
    the turns, as `system`. Raises InputError for another."""
    turns = record.get("messages") or record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise InputError(NEEDED)
    messages = [_message(turn, f"messages[{number}]") for number, turn in enumerate(turns)]
    return with_system(messages, record.get("system") or None)


def check_text(value: object) -> None:
    """Raises InputError where a text of a JSON value has half of a surrogate pair: JSON can hold it
    and UTF-8 cannot, so it is neither tokenised, sent nor written."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise InputError("has half of a surrogate pair, as of an emoji that was cut") from error


def _message(turn: object, field: str) -> Message:
    if not isinstance(turn, dict):
        raise InputError("must be an object with role and content", field=field, value=turn)
    # A table has a null for each key that other rows have.
    role = turn.get("role") or turn.get("from")
    if isinstance(role, str):
        role = SHAREGPT_ROLES.get(role, role)
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    calls = turn.get("tool_calls") if role == "assistant" else None
    if calls and content is None:
        content = ""
    if role not in ROLES:
        fix = f"choose {', '.join(ROLES)}"
        raise InputError("has an unknown role", field=field, value=role, fix=fix)
    if isinstance(content, list):
        content = _joined(content, field)
    if not isinstance(content, str):
        raise InputError("its content must be a text", field=field, value=content)
    message = {"role": role, "content": content}
    message |= {key: turn[key] for key in KEPT if turn.get(key) is not None}
    if thought := next((turn[key] for key in (*THINKING, "reasoning") if turn.get(key)), None):
        message |= dict.fromkeys(THINKING, thought)
    if calls:
        message["tool_calls"] = [_tool_call(call, field) for call in calls]
    return message


def _joined(parts: list[Any], field: str) -> str:
    """One text of the parts of a message. Raises InputError for a part that is none."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            why = f"has a part of type {kind!r}, which is not supported"
            raise InputError(why, field=field, fix="send parts of type 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: object, field: str) -> dict[str, Any]:
    """A call as templates read it: OpenAI's, with arguments that are an object, not its JSON."""
    given = call if isinstance(call, dict) else {}
    function = given.get("function") or given
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError("a tool call must be a function with a name", field=field, value=call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _from_json(arguments.strip() or "{}", field)
    identity = {} if given.get("id") is None else {"id": given["id"]}
    return identity | _function(function["name"], arguments)


def _function(name: str, arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def to_style(record: dict[str, Any]) -> Style:
    """Read `tools` and `template_args` of a record. Raises InputError for values of other types."""
    tools = record.get("tools")
    args = record.get("template_args") or {}
    if isinstance(tools, str):
        tools = _from_json(tools, "tools")
    if not isinstance(tools, list | None):
        raise InputError("must be a list", field="tools", value=tools)
    if not isinstance(args, dict):
        raise InputError("must be an object", field="template_args", value=args)
    return Style(tools or None, args)


def _from_json(text: str, field: str) -> Any:
    try:
        found = json.loads(text)
        check_text(found)
    except (ValueError, RecursionError) as error:
        raise InputError("not JSON", field=field, value=text) from error
    return found
