"""Parse the tokens of an answer into the message that a chat template writes them for."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from peagle.data.chat import Message
from peagle.model.thoughts import answer_template


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
    except (ValueError, KeyError):
        return plain
    parts = {name: value for name, value in parsed.items() if value}
    return {**plain, "content": "", **parts}
