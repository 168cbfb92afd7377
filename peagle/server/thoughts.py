"""Thoughts and the rest of an answer, told apart as it comes."""

from bisect import bisect_left
from os.path import commonprefix

import regex
from transformers import PreTrainedTokenizerBase

from peagle.model.thoughts import find_thoughts


class ThoughtParser:
    """Tells the thoughts of one answer from the rest of its text, as it comes; where the marks of
    thoughts have no text, once it has ended. White space around thoughts is dropped. An answer
    that a response template parses has no thoughts here."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        thoughts, stage, marks = find_thoughts(tokenizer), "after", ("", "")
        if thoughts is not None and thoughts.marks is not None:
            stage, marks = thoughts.stage(tokenizer, prompt), thoughts.marks
        opening = "" if stage == "inside" else regex.escape(marks[0].strip())
        self._opening = regex.compile(rf"\s*{opening}\s*")
        self._closing = regex.compile(rf"\s*{regex.escape(marks[1])}\s*")
        spelled = self._tokenizer.encode(marks[1], add_special_tokens=False).ids
        self._hidden = marks[1] not in self._tokenizer.decode(spelled)
        self._begun, self._over = False, stage == "after"
        self._held = ""
        self.length = 0  # of the thoughts, in tokens, where their marks are hidden

    def push(self, text: str, output: list[int] | None = None) -> tuple[str, str]:
        """Add text; returns what is certain of the thoughts, and of the rest. `output` are the
        tokens of an answer that has ended."""
        self._held += text
        ended, thoughts, rest = output is not None, "", ""
        if self._hidden and not self._over:
            return self._split(output) if output is not None else ("", "")
        if not self._begun and not self._over:
            self._begin(ended)
        if self._begun and not self._over:
            thoughts = self._think(ended)
        if self._over:
            rest, self._held = self._held, ""
        return thoughts, rest

    def _begin(self, ended: bool) -> None:
        """Take the mark that begins thoughts, once it is known whether the answer has it."""
        mark = self._opening.match(self._held, partial=not ended)
        if mark is None:
            self._over = True
        elif ended or mark.end() < len(self._held):
            self._begun, self._held = True, self._held[mark.end() :]

    def _think(self, ended: bool) -> str:
        """Take the thoughts, and the mark that ends them."""
        mark = self._closing.search(self._held, partial=not ended)
        thoughts = self._held if mark is None else self._held[: mark.start()]
        self._over = mark is not None and (ended or mark.end() < len(self._held))
        self._held = self._held[mark.end() if mark and self._over else len(thoughts) :]
        return thoughts.rstrip() if ended else thoughts

    def _split(self, output: list[int]) -> tuple[str, str]:
        """Tell both by the tokens of the answer."""

        def shown(count: int) -> str:
            return self._tokenizer.decode(output[:count], skip_special_tokens=False)

        if not self._opening.match(shown(len(output))):
            return "", self._held
        self.length = bisect_left(
            range(len(output)), True, key=lambda count: bool(self._closing.search(shown(count)))
        )
        thoughts = commonprefix([self._held, self._tokenizer.decode(output[: self.length])])
        return thoughts.strip(), self._held.removeprefix(thoughts).lstrip()
