"""Parse the tokens of an answer into the message that a chat template writes them for."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Message

# Harmony, the format of GPT-OSS: an answer is several messages, each in a channel. It is one of
# transformers' response templates, which the published tokenizers lack.
HARMONY: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
            "join": "\n",
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)"
            r"(?: ?<\|constrain\|>\w+)?<\|message\|>",
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|channel\|>commentary)? to=functions\.(?P<name>[\w.-]+)"
            r"(?:<\|channel\|>commentary)?[^<]*(?:<\|constrain\|>)?[^<]*<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}


def answer_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the model's response template, for `parse_response`; None: plain text."""
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    harmony = "<|channel|>final<|message|>" in str(tokenizer.chat_template or "")
    return own or (HARMONY if harmony else None)


def to_message(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: Sequence[int], text: str
) -> Message:
    """Return the assistant's message: thoughts, text and tool calls apart where the model marks
    them. A model without marks, or an answer that breaks its format, gives `text` as it is."""
    plain = {"role": "assistant", "content": text}
    if (template := answer_template(tokenizer)) is None:
        return plain
    try:
        parsed = tokenizer.parse_response(list(answer), template, prefix=prompt)
    except (ValueError, KeyError):
        return plain
    parts = {name: value for name, value in parsed.items() if value}
    return {**plain, "content": "", **parts}
