"""From the tokens of an answer to the message that a chat template would write them for."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Message

# Harmony, as GPT-OSS speaks it: an answer is several messages, each in a channel. In the form of
# transformers' response templates, which the published tokenizers do not have.
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
    """How its model answers, for transformers' `parse_response`; None: in plain text."""
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    harmony = "<|channel|>final<|message|>" in str(tokenizer.chat_template or "")
    return own or (HARMONY if harmony else None)


def to_message(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: Sequence[int], text: str
) -> Message:
    """The assistant's message: what was thought, said and called apart, where the model marks them;
    else, or when the answer is not as its format has it, all of the `text`."""
    plain = {"role": "assistant", "content": text}
    if (template := answer_template(tokenizer)) is None:
        return plain
    try:
        said = tokenizer.parse_response(list(answer), template, prefix=prompt)
    except (ValueError, KeyError):
        return plain
    return {**plain, "content": "", **{name: value for name, value in said.items() if value}}
