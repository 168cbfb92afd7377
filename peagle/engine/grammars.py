"""Compiling JSON schemas, regexes and grammars for a target; thoughts before an answer follow none.

llguidance does the parsing. `end_tokens` of the target are allowed exactly where the grammar may
end, and are all that is allowed where it must.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peagle.catalog import model_name
from peagle.engine.grammar import Matcher, error_line
from peagle.engine.grammar_checker import GrammarChecker
from peagle.engine.params import SamplingParams
from peagle.errors import InputError
from peagle.model.base_target import BaseTarget
from peagle.model.thoughts import find_thoughts

COMPILED = 16  # grammars that are kept; one may take 50 MB
MAX_BYTES = 2**18  # text of a grammar
# llguidance's limits, with a lower one for the work before the first token.
LIMITS: dict[str, Any] = {"verbose_errors": False, "initial_lexer_fuel": 300_000}
# Between the tokens of JSON: a line break, and its indentation. Without bounds a small model may
# go on with white space for ever.
SPACE = r"\n?[ \t]{0,32}"
TAIL = 32  # newest tokens, which the end of thoughts is looked for in
UNMATCHABLE = {"NoExtensionBias": "no token sequence of this vocabulary matches it"}


def _of_schema(schema: str) -> str:
    """The schema may have options of its own for llguidance, under "x-guidance"."""
    options = json.loads(schema).get("x-guidance")
    if isinstance(options, dict) and "whitespace_flexible" in options:
        return LLMatcher.grammar_from_json_schema(schema)
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": SPACE})


FORMS: dict[str, Callable[[str], str]] = {
    "json_schema": _of_schema,
    "regex": LLMatcher.grammar_from_regex,
    "grammar": LLMatcher.grammar_from_lark,
}


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of a tokenizer's added tokens, which text is searched for first, by their text."""
    every = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
    return {token.content: number for number, token in every}


def in_lark(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text as part of a rule of a Lark grammar. Added tokens in it are written by their ids: a
    literal stands for bytes, which llguidance does not find in such a token."""
    added = added_tokens(tokenizer)
    longest_first = sorted(added, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if added else [text]
    written = [f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts]
    return " ".join(part for part in written if part != '""')


class Grammars:
    """A target's grammars: its vocabulary is read once; compiled ones are kept."""

    def __init__(self, target: BaseTarget) -> None:
        self._target = target
        self._compiled = lru_cache(COMPILED)(self._compile)

    def matcher(self, params: SamplingParams, prompt: Sequence[int] = ()) -> Matcher | None:
        """The grammar of the answer to a prompt, after its thoughts; None without one.

        Raises InputError for a grammar that cannot be compiled, and for a target that can follow
        none.
        """
        if params.constraint is None:
            return None
        ends = frozenset(self._tokens.eos_tokens)  # first: it may refuse, whatever the grammar is
        compiled = self._compiled(*params.constraint)
        matcher = Matcher(compiled, len(self._target.embedding), ends, self._spelled)
        return after_thoughts(matcher, self._target.tokenizer, prompt)

    def warm_up(self) -> None:
        """Read the vocabulary and start the checker now, so that no request waits for them. Errors
        are raised later, by the requests with a grammar: others are answered without."""
        with suppress(Exception):
            self._checker.start()  # it reads the vocabulary while this process does
            assert self._tokens
            self._compiled("regex", "a")

    @cached_property
    def _setup(self) -> tuple[str, int, list[int]]:
        """The arguments of llguidance's tokenizer: the fast tokenizer's JSON, V, ids of ends.

        Raises ValueError without one of them.
        """
        tokenizer = self._target.tokenizer
        ends = sorted(self._target.end_tokens)
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or not ends:
            lacks = "a fast tokenizer" if ends else "a token that ends an answer"
            raise ValueError(f"it lacks {lacks}")
        backend = tokenizer.backend_tokenizer
        if backend.padding or backend.truncation:
            backend = copy(backend)  # takes a second for large vocabularies
            backend.no_padding()
            backend.no_truncation()
        return backend.to_str(), max(len(self._target.embedding), len(tokenizer)), ends

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """The vocabulary. Raises InputError for a tokenizer that llguidance cannot use, such as one
        whose tokens are no bytes."""
        try:
            return LLTokenizer(*self._setup)
        except ValueError as error:
            name = model_name(self._target.name)
            raise InputError(f"{name} cannot follow grammars: {error_line(str(error))}") from error

    @cached_property
    def _spelled(self) -> dict[int, int]:
        """The token that begins to spell the text of each added token."""
        added = added_tokens(self._target.tokenizer)
        begin = {start: self._tokens.tokenize_str(start) for start in {text[0] for text in added}}
        return {token: begin[text[0]][0] for text, token in added.items() if begin[text[0]]}

    @cached_property
    def _checker(self) -> GrammarChecker:
        return GrammarChecker(*self._setup, LIMITS)

    def _compile(self, form: str, text: str) -> LLMatcher:
        if (size := len(text.encode(errors="replace"))) > MAX_BYTES:
            large = f"has {size} bytes, at most {MAX_BYTES} are compiled"
            raise InputError(large, field=form, value=text, fix="make it smaller")
        try:
            grammar = FORMS[form](text)
        except (ValueError, RecursionError) as error:
            # Of a schema: its options, its depth; of a regex: half of a surrogate pair.
            raise InputError(error_line(str(error)), field=form, value=text) from error
        if why := self._checker.refusal(grammar):
            raise InputError(why, field=form, value=text, fix="make it smaller or less deep")
        state = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        state.compute_bitmask()
        if why := error_line(state.get_error()):
            raise InputError(UNMATCHABLE.get(why, why), field=form, value=text)
        return state


def after_thoughts(
    answer: Matcher, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
) -> Matcher:
    """The matcher of an answer, which begins after the thoughts that may follow a prompt."""
    thoughts = find_thoughts(tokenizer)
    stage = "after" if thoughts is None else thoughts.stage(tokenizer, prompt)
    if thoughts is None or stage == "after":
        return answer
    opening = None
    if stage == "before":
        opening, *more = tokenizer(thoughts.opening, add_special_tokens=False)["input_ids"]
        if more and answer.allowed()[opening]:
            return answer  # the opening may begin either of them
    decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return AfterThoughts(answer, lambda ids: bool(thoughts.closing.search(decode(ids))), opening)


class AfterThoughts(Matcher):
    """Allows every token while the target thinks, then those that its answer's grammar allows."""

    def __init__(
        self, answer: Matcher, ended: Callable[[list[int]], bool], opening: int | None
    ) -> None:
        """`ended`: whether thoughts end with these tokens, the newest ones. `opening`: the token
        that thoughts may begin with; None once they have begun."""
        self._answer = answer
        self.vocabulary = answer.vocabulary
        self._ended = ended
        self._opening = opening
        self._tail = list[int]()
        self._over = False

    def allowed(self) -> Tensor:
        if not self._over and self._opening is None:
            return torch.ones(self.vocabulary, dtype=torch.bool)
        allowed = self._answer.allowed()
        if not self._over:
            allowed[self._opening] = True
        return allowed

    def count_allowed(self, tokens: Sequence[int]) -> int:
        thoughts = copy(self)._take_thoughts(tokens)
        return thoughts + self._answer.count_allowed(tokens[thoughts:])

    def after(self, token: int) -> Matcher | None:
        further = copy(self)
        if not further._take_thought(token):
            return self._answer.after(token)
        return None if token in self._answer._ends else further

    def advance(self, tokens: list[int]) -> None:
        self._answer.advance(tokens[self._take_thoughts(tokens) :])

    def _take_thoughts(self, tokens: Sequence[int]) -> int:
        """Take tokens of the thoughts; returns their number."""
        return len(list(takewhile(self._take_thought, tokens)))

    def _take_thought(self, token: int) -> bool:
        """Take a token of the thoughts; False for a token of the answer."""
        if self._over or self._opening not in (None, token):
            self._over = True
            return False
        self._opening = None
        self._tail = [*self._tail, token][-TAIL:]
        self._over = self._ended(self._tail)
        return True
