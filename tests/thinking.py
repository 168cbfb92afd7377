"""Tiny tokenizers of models that think, and a target with given answers."""

from collections.abc import Callable

import pytest
import tiny
from tiny import make_target, make_tokenizer
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from peagle.engine.sampling import Sampler
from peagle.engine.tree import Draft
from peagle.model.target import Target

# As Qwen3: thoughts of the last answer are shown, made up where it has none; they may be disabled.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# As DeepSeek's R1: the prompt begins the thoughts, and no template shows any.
R1 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% endif %}"
)
OTHER = QWEN3.replace("<think>", "<|hm|>").replace("</think>", "<|so|>")


def byte_level(marks: str = "added", template: str = QWEN3) -> PreTrainedTokenizerFast:
    """`marks` of thoughts are "added" tokens, "special" ones, or "text"."""
    return with_marks(make_tokenizer(template), marks)


def byte_fallback(marks: str = "added", template: str = QWEN3) -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: the words are bytes."""
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<0x{b:02X}>" for b in range(256))]
    backend = tiny.byte_fallback(words)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>"]})
    tokenizer.chat_template = template
    return with_marks(tokenizer, marks)


def with_marks(tokenizer: PreTrainedTokenizerFast, marks: str) -> PreTrainedTokenizerFast:
    if marks != "text":
        special = marks == "special"
        names = ["<think>", "</think>", "<|hm|>", "<|so|>"]
        tokens = [AddedToken(name, special=special) for name in names]
        tokenizer.add_tokens(tokens, special_tokens=special)
    return tokenizer


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def thinking_target(tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(make_target(len(tokenizer)).model, tokenizer, "thinker")


def say(monkeypatch: pytest.MonkeyPatch, script: list[int]) -> None:
    """Make targets say this, where a grammar lets them."""
    rows: Callable[[Sampler, Tensor, Draft], Tensor] = Sampler._rows

    def biased(self: Sampler, logits: Tensor, draft: Draft) -> Tensor:
        logits = logits.clone()
        for row, tail in enumerate(draft.tails()):
            place = self._emitted + len(tail)
            if place < len(script):
                logits[row, script[place]] += 1000
        return rows(self, logits, draft)

    monkeypatch.setattr(Sampler, "_rows", biased)
    monkeypatch.setattr(Sampler, "plain", False)


HARMONY_MARKS = ["start", "end", "message", "channel", "constrain", "return", "call"]
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def harmony(template: str = HARMONY) -> PreTrainedTokenizerFast:
    """As GPT-OSS."""
    tokenizer = make_tokenizer(template)
    names = [f"<|{mark}|>" for mark in HARMONY_MARKS]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer
