"""How a target marks what it thinks before it answers, and where its answer begins."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import PreTrainedTokenizerBase

from peagle.errors import InputError
from peagle.model.template import apply_template

HARMONY = Path(__file__).with_name("harmony.yaml")
THINKING = ("thinking", "reasoning_content")  # of a message; each template reads one of them
MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # of templates that show no thoughts
ASKED = [{"role": "user", "content": "word"}]
ANSWER = {
    "role": "assistant",
    "content": "peagleanswer",
    **dict.fromkeys(THINKING, "peaglethought"),
}
AROUND = re.compile(r"(.*\S)\s*peaglethought\s*(\S.*?)\s*peagleanswer", re.DOTALL)
PROMPT_TAIL = 128  # newest tokens of a prompt: more than a template writes before an answer


def answer_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the model's response template, for `parse_response`; None: plain text."""
    own: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    harmony = "<|channel|>final<|message|>" in str(tokenizer.chat_template or "")
    return own or (_harmony() if harmony else None)


@cache
def _harmony() -> dict[str, Any]:
    template: dict[str, Any] = yaml.safe_load(HARMONY.read_text(encoding="utf-8"))
    return template


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a target marks its thoughts."""

    header: str  # what the chat template writes before an answer, thoughts excepted
    opening: str | None  # what begins them; None: every answer begins with them
    closing: re.Pattern[str]  # what ends them, just before the answer
    marks: tuple[str, str] | None  # what begins and ends them; None: a response template parses it

    def stage(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
    ) -> Literal["before", "inside", "after"]:
        """Where a prompt leaves the target: before thoughts, which may not come, inside, or after
        them, as where it is no conversation up to an answer."""
        tail = list(prompt[-PROMPT_TAIL:])
        text = tokenizer.backend_tokenizer.decode(tail, skip_special_tokens=False)
        _, header, begun = text.rpartition(self.header)
        if not header or self.closing.search(begun):
            return "after"
        if self.opening is None or self.opening in begun:
            return "inside"
        return "after" if begun.strip() else "before"


def find_thoughts(tokenizer: PreTrainedTokenizerBase) -> Thoughts | None:
    """As the response template has them, or else the chat template; None where neither does."""
    return _find(tokenizer, f"{tokenizer.chat_template} {answer_template(tokenizer)}")


@lru_cache(64)
def _find(tokenizer: PreTrainedTokenizerBase, _templates: str) -> Thoughts | None:
    try:
        asked = apply_template(tokenizer, ASKED, answer=False)
        prompt = apply_template(tokenizer, ASKED, answer=True).removeprefix(asked)
        written = apply_template(tokenizer, [*ASKED, ANSWER], answer=False).removeprefix(asked)
    except InputError:
        return None
    template, marks = answer_template(tokenizer), None
    if template is None:
        named = [pair for pair in MARKS if pair[1] in str(tokenizer.chat_template)]
        marks = next(iter([*_around_thoughts(prompt, written), *named]), ("", ""))
        template = {"fields": {"thinking": {"open": marks[0], "close": marks[1]}}}
    fields = template.get("fields", {})
    thinking: dict[str, Any] = next((fields[name] for name in THINKING if name in fields), {})
    begins = _pattern(fields.get("content", {}), "open")  # of harmony's last message
    closing = begins or _pattern(thinking, "close")
    opening = None if begins else next(iter(_literals(thinking, "open")), None)
    header = prompt.partition(opening)[0].strip() if opening else prompt.strip()
    return Thoughts(header, opening, re.compile(closing), marks) if closing and header else None


def _around_thoughts(prompt: str, written: str) -> Iterator[tuple[str, str]]:
    """What the chat template writes before and after thoughts, where it shows them."""
    if found := AROUND.match(written):
        before, closing = found.groups()
        shared = commonprefix([before, prompt])
        yield before.removeprefix(shared).strip() or before.split()[-1], closing


def _literals(field: dict[str, Any], anchor: str) -> list[str]:
    literals = field.get(anchor, [])
    return [literals] if isinstance(literals, str) else literals


def _pattern(field: dict[str, Any], anchor: str) -> str | None:
    """A regular expression of an anchor of a response template."""
    return "|".join(map(re.escape, _literals(field, anchor))) or field.get(f"{anchor}_pattern")
