"""Thoughts of a target: the marks around them in its chat template, and where an answer begins."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

HARMONY = Path(__file__).with_name("harmony.yaml")
THINKING = ("thinking", "reasoning_content")  # of a message; each template reads one of them
# Of templates that show no thoughts.
MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
ASKED = [{"role": "user", "content": "word"}]
ANSWER = {"role": "assistant", "content": "peagleanswer"} | dict.fromkeys(THINKING, "peaglethought")
AROUND = re.compile(r"(.*\S)\s*peaglethought\s*(\S.*?)\s*peagleanswer", re.DOTALL)
MARK = re.compile(r"[<\[][^<\[]*|\S+")
PROMPT_TAIL = 128  # newest tokens of a prompt: more than a template writes before an answer


def answer_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the model's response template, for `parse_response`; None: plain text."""
    template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    harmony = "<|channel|>final<|message|>" in str(tokenizer.chat_template or "")
    return template or (_harmony() if harmony else None)


@cache
def _harmony() -> dict[str, Any]:
    return dict(yaml.safe_load(HARMONY.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Marks around a target's thoughts."""

    header: str  # what the chat template writes before an answer, thoughts excepted
    opening: str | None  # what begins them, with space before; None: every answer begins so
    closing: re.Pattern[str]  # what ends them, just before the answer
    marks: tuple[str, str] | None  # what begins and ends them; None: a response template parses it

    def stage(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
    ) -> Literal["before", "inside", "after"]:
        """The position after a prompt: before thoughts (which are optional), inside, or after them.
        A prompt that is not a conversation up to an answer is after them."""
        tail = list(prompt[-PROMPT_TAIL:])
        text = tokenizer.backend_tokenizer.decode(tail, skip_special_tokens=False)
        _, header, begun = text.rpartition(self.header)
        if not header or self.closing.search(begun):
            return "after"
        if self.opening is None or self.opening.strip() in begun:
            return "inside"
        return "after" if begun.strip() else "before"


def find_thoughts(tokenizer: PreTrainedTokenizerBase) -> Thoughts | None:
    """The marks of the response template, else of the chat template; None where neither has any."""
    try:
        return _find(tokenizer, f"{tokenizer.chat_template} {answer_template(tokenizer)}")
    except (TemplateError, TypeError, ValueError):  # no template, or one that refuses this
        return None


@lru_cache(64)
def _find(tokenizer: PreTrainedTokenizerBase, _templates: str) -> Thoughts | None:
    write = partial(tokenizer.apply_chat_template, tokenize=False)
    asked = write(ASKED)
    prompt = write(ASKED, add_generation_prompt=True).removeprefix(asked)
    template = answer_template(tokenizer)
    marks = None
    if template is None:
        written = write([*ASKED, ANSWER]).removeprefix(asked)
        marks = _marks(str(tokenizer.chat_template), prompt, written)
        if marks is None:
            return None
        template = {"fields": {"thinking": {"open": marks[0], "close": marks[1]}}}
    fields = template.get("fields", {})
    thinking: dict[str, Any] = next((fields[name] for name in THINKING if name in fields), {})
    begins = _pattern(fields.get("content", {}), "open")  # of harmony's last message
    closing = begins or _pattern(thinking, "close")
    opening = None if begins else next(iter(_literals(thinking, "open")), None)
    if not closing:
        return None
    first = f"{re.escape(opening.strip())}|{closing}" if opening else closing
    header = re.split(first, prompt, maxsplit=1)[0].strip()
    return Thoughts(header, opening, re.compile(closing), marks) if header else None


def _marks(template: str, prompt: str, written: str) -> tuple[str, str] | None:
    """The texts that a chat template writes around thoughts, else known marks that it names."""
    if found := AROUND.match(written):
        before, closing = found.groups()
        shared = commonprefix([before, prompt])
        return before.removeprefix(shared) or MARK.findall(before)[-1], closing
    return next((marks for marks in MARKS if marks[1] in template), None)


def _literals(field: dict[str, Any], anchor: str) -> list[str]:
    literals = field.get(anchor, [])
    return [literals] if isinstance(literals, str) else literals


def _pattern(field: dict[str, Any], anchor: str) -> str | None:
    """A regular expression of an anchor of a response template."""
    return "|".join(map(re.escape, _literals(field, anchor))) or field.get(f"{anchor}_pattern")
