"""A request's place in its grammar: which tokens may come next, along a draft.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from textwrap import shorten

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from peagle.engine.params import GrammarTooComplex, RequestFailure
from peagle.engine.tree import Draft


class Matcher:
    """Grammar state of one sequence: a copy of the `compiled` one, which may take 50 MB, made when
    it is first needed. `spelled`: for each added token, the token that begins to spell its text."""

    def __init__(
        self, compiled: LLMatcher, vocabulary: int, ends: frozenset[int], spelled: Mapping[int, int]
    ) -> None:
        self._compiled = compiled
        self.vocabulary = vocabulary
        self._ends = ends
        self._spelled = spelled

    @cached_property
    def _state(self) -> LLMatcher:
        return self._compiled.deep_copy()

    def allowed(self) -> Tensor:
        """Tokens (V,) bool that may come next; at least one.

        Raises GrammarTooComplex when llguidance's limits, or this vocabulary, allow none.
        """
        words = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            why = error_line(self._state.get_error())
            raise GrammarTooComplex(f"the grammar cannot be followed any further: {why}")
        bits = np.unpackbits(words, count=self.vocabulary, bitorder="little")
        token = int(bits.argmax())
        if bits.sum() == 1 and not (self._state.is_stopped() or self.count_allowed([token])):
            # llguidance finds added tokens in the text that must come, and then refuses them: they
            # stand for no bytes. The text is spelled with other tokens. It also leaves out bytes
            # that no token has.
            if token not in self._spelled and token not in self._ends:
                raise GrammarTooComplex("the grammar demands text that no token spells")
            bits[token] = 0
            bits[self._spelled.get(token, token)] = 1
        return torch.from_numpy(bits).bool()

    def draftable(self) -> Tensor:
        """As `allowed`; none when the matcher has failed, which its sequence learns when the next
        token is chosen."""
        try:
            return self.allowed()
        except RequestFailure:
            return torch.zeros(self.vocabulary, dtype=torch.bool)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """The first of some tokens that may come next, one after another; 0 when the matcher has
        failed. An end that must come is not counted."""
        return int(self._state.validate_tokens(list(tokens)))

    def masks(self, draft: Draft) -> Tensor:
        """Tokens (R, V) that may follow the newest one and each of a draft's R − 1 nodes.
        Rows after an illegal or final token allow all tokens; they are never read. After a node
        where the matcher fails no token may follow: the request fails if the target goes there."""
        rows = torch.ones(len(draft) + 1, self.vocabulary, dtype=torch.bool)
        rows[0] = self.allowed()
        matchers = {0: self}
        for row, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True), 1):
            before = matchers.get(parent)
            if before is None or not rows[parent, token]:
                continue
            matcher = before.after(token)
            if matcher is not None:
                rows[row] = matcher.draftable()
                matchers[row] = matcher
        return rows

    def after(self, token: int) -> "Matcher | None":
        """A copy advanced by one allowed token; None at the end. Does not change self."""
        if token in self._ends:
            return None
        further = copy(self)
        # `rollback` leaves states that refuse what they allowed.
        further._state = self._state.deep_copy()
        further._state.consume_token(token)
        return further

    def advance(self, tokens: list[int]) -> None:
        """Tokens that were allowed have been emitted; the last one may be an end.

        Raises RequestFailure when the grammar refuses one: a fault of this program.
        """
        tokens = [token for token in tokens if token not in self._ends]
        if self.count_allowed(tokens) < len(tokens) and not self._state.is_error():
            raise RequestFailure("the grammar refuses a token that it allowed")
        self._state.consume_tokens(tokens)


def error_line(text: str) -> str:
    """llguidance's error in one line."""
    return shorten(text.strip().removesuffix("<non-verbose/>"), 400, placeholder=" …")
