"""From a conversation to token ids and the mask of what the assistant said."""

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from peagle.config import InputError

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
ROLES = ("user", "assistant", "system")
Message = dict[str, str]


class Example(NamedTuple):
    """One training document."""

    ids: list[int]
    supervised: list[bool]  # tokens the target said itself


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Token ids up to where the assistant's answer begins."""
    text = render(tokenizer, messages, answer=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, answer: bool) -> str:
    """The conversation as text; with `answer`, followed by the opening of the assistant's turn.

    Raises InputError when the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise InputError("the target's tokenizer has no chat template: give prompts as plain text")
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)


def encode_conversation(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Example:
    """Ids of the whole conversation; the answers and their end-of-turn tokens are supervised.

    Raises InputError when there is no assistant turn, or when the template rewrites earlier turns
    so that answers cannot be found in the whole.
    """
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(tokenizer, messages[:index], answer=True)
            after = render(tokenizer, messages[: index + 1], answer=False)
            if not after.startswith(before):
                why = "the chat template rewrites earlier turns"
                raise InputError(f"{why}: answers cannot be located")
            spans.append((len(before), len(after.rstrip())))
    if not spans:
        raise InputError("the conversation has no assistant turn to train on")
    text = render(tokenizer, messages, answer=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(lo <= start < hi for lo, hi in spans) for start, _ in encoded["offset_mapping"]]
    return Example(encoded["input_ids"], inside)


def to_messages(record: dict[str, Any]) -> list[Message]:
    """Messages of a `messages` or ShareGPT `conversations` record. Raises InputError otherwise."""
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise InputError("needs 'messages' (role, content) or 'conversations' (from, value)")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise InputError(f"a turn is {turn!r:.40}: expected an object with role and content")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        if role not in ROLES or not isinstance(content, str):
            raise InputError(f"turn with role {role!r}: expected one of {ROLES} and a text")
        messages.append({"role": role, "content": content})
    return messages
