"""Answers of a given form: which tokens a JSON schema, regex or grammar allows next.

Shapes: R rows, V vocabulary.

llguidance does the parsing. What ends an answer (any id of `end_tokens`) is allowed exactly where
the grammar may end, and is all that is allowed where it must.
"""

import json
from collections.abc import Callable
from functools import cached_property, lru_cache
from textwrap import shorten

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from peagle.config import InputError
from peagle.engine.request import RequestFailure, SamplingParams
from peagle.engine.text import end_tokens
from peagle.model.target import Target

TOO_COMPLEX = "the grammar cannot be followed any further"
COMPILED = 64  # grammars that are kept
# Between the tokens of JSON: a line break, and its indentation. Without bounds a small model may
# go on with white space for ever.
SPACE = r"\n?[ \t]{0,32}"
UNMATCHABLE = {"NoExtensionBias": "nothing that this target can say matches it"}


def _of_schema(schema: str) -> str:
    """The schema may have options of its own for llguidance, under "x-guidance"."""
    own = json.loads(schema).get("x-guidance")
    if isinstance(own, dict) and "whitespace_flexible" in own:
        return LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": SPACE})


FORMS: dict[str, Callable[[str], str]] = {
    "json_schema": _of_schema,
    "regex": LLMatcher.grammar_from_regex,
    "grammar": LLMatcher.grammar_from_lark,
}


class Grammars:
    """A target's grammars: its vocabulary is read once, at the first; compiled ones are kept."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._compiled = lru_cache(COMPILED)(self._compile)

    def matcher(self, params: SamplingParams) -> "Matcher | None":
        """What a new sequence must follow; None when nothing.

        Raises InputError for what cannot be compiled.
        """
        if params.constraint is None:
            return None
        state = self._compiled(*params.constraint).deep_copy()
        return Matcher(state, len(self._target.embedding), frozenset(self._tokens.eos_tokens))

    @cached_property
    def _tokens(self) -> LLTokenizer:
        tokenizer, ends = self._target.tokenizer, sorted(end_tokens(self._target))
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or not ends:
            lacks = "no token that ends an answer" if ends == [] else "no fast tokenizer"
            raise InputError(f"{self._target.name} has {lacks}: it cannot follow a grammar")
        size = max(len(self._target.embedding), len(tokenizer))
        return llguidance.hf.from_tokenizer(tokenizer, size, ends)

    def _compile(self, form: str, text: str) -> LLMatcher:
        try:
            limits = LLParserLimits(verbose_errors=False)
            state = LLMatcher(self._tokens, FORMS[form](text), log_level=0, limits=limits)
            state.compute_bitmask()
            why = state.get_error()
        except ValueError as error:  # options inside a schema
            why = str(error)
        if why:
            why = UNMATCHABLE.get(_line(why), _line(why))
            raise InputError(f"{form} {_short(text)}: {why}")
        return state


class Matcher:
    """How far one sequence is in its grammar."""

    def __init__(self, state: LLMatcher, vocabulary: int, ends: frozenset[int]) -> None:
        self._state, self.vocabulary, self._ends = state, vocabulary, ends

    def allowed(self) -> Tensor:
        """Tokens (V,) bool that may come next; at least one.

        Raises RequestFailure when the grammar has become too complex for llguidance's limits.
        """
        words = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            why = _line(self._state.get_error())
            raise RequestFailure(f"{TOO_COMPLEX}: {why}")
        bits = np.unpackbits(words, count=self.vocabulary, bitorder="little")
        return torch.from_numpy(bits).bool()

    def masks(self, draft: list[int]) -> Tensor:
        """Tokens (R, V) that may follow each of the R = len(draft) + 1 prefixes of a draft; all,
        behind a token that may not come or ends the answer, where nothing is ever read."""
        rows = torch.ones(len(draft) + 1, self.vocabulary, dtype=torch.bool)
        walk = self.walk()
        rows[0] = self.allowed()
        for i, token in enumerate(draft):
            if not rows[i, token] or not walk.step(token):
                break
            rows[i + 1] = self.allowed()
        walk.undo()
        return rows

    def advance(self, tokens: list[int]) -> None:
        """Tokens that were allowed have been emitted."""
        self._state.consume_tokens(tokens)

    def walk(self) -> "Walk":
        """Try tokens; `undo` before anything else is done with this matcher."""
        return Walk(self, self._state, self._ends)


class Walk:
    """A draft through a grammar, token by token."""

    def __init__(self, matcher: Matcher, state: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher, self._state, self._ends = matcher, state, ends
        self._steps = 0
        self.draft: list[int] = []
        self.over = False  # nothing may be added

    def allowed(self) -> Tensor:
        """As `Matcher.allowed`, behind the draft so far; none when the matcher has failed, which
        its sequence learns when the next token is chosen."""
        try:
            return self._matcher.allowed()
        except RequestFailure:
            return torch.zeros(self._matcher.vocabulary, dtype=torch.bool)

    def step(self, token: int) -> bool:
        """Add a token that is allowed; False when it ends the answer."""
        self.draft.append(token)
        # llguidance does not count the end among the steps it takes back.
        self.over = token in self._ends
        if not self.over:
            self._state.consume_token(token)
            self._steps += 1
        return not self.over

    def stop(self) -> None:
        """Add nothing more."""
        self.over = True

    def undo(self) -> list[int]:
        """Back to where the walk began; returns the draft."""
        self._state.rollback(self._steps)
        return self.draft


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _line(text: str) -> str:
    return shorten(text.strip().removesuffix("<non-verbose/>"), 400, placeholder=" …")
