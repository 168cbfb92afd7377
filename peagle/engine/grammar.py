"""A request's place in its grammar: which tokens may come next, along a draft and back.

Shapes: R rows, V vocabulary.
"""

from textwrap import shorten

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from peagle.engine.params import RequestFailure

TOO_COMPLEX = "the grammar cannot be followed any further"


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
            why = error_line(self._state.get_error())
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


def error_line(text: str) -> str:
    """llguidance's error in one line."""
    return shorten(text.strip().removesuffix("<non-verbose/>"), 400, placeholder=" …")
