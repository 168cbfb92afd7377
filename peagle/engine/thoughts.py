"""A grammar that begins after a target's thoughts, which follow none."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.engine.grammar import Matcher
from peagle.model.thoughts import find_thoughts

TAIL = 32  # newest tokens, which the end of thoughts is looked for in


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
    """Allows every token while the target thinks, then what the answer's grammar allows."""

    def __init__(
        self,
        answer: Matcher,
        ended: Callable[[list[int]], bool],  # by these tokens, the newest ones
        opening: int | None,  # token that thoughts may begin with; None once they have begun
    ) -> None:
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
        return self._answer.count_allowed(tokens) if self._over else len(tokens)

    def after(self, token: int) -> Matcher | None:
        further = copy(self)
        if not further._thinks(token):
            return self._answer.after(token)
        return None if token in self._answer._ends else further

    def advance(self, tokens: list[int]) -> None:
        for number, token in enumerate(tokens):
            if not self._thinks(token):
                self._answer.advance(tokens[number:])
                return

    def _thinks(self, token: int) -> bool:
        """Go on by a token of the thoughts; False for one that is the answer's."""
        if self._over or self._opening not in (None, token):
            self._over = True
            return False
        self._opening = None
        self._tail = [*self._tail, token][-TAIL:]
        self._over = self._ended(self._tail)
        return True
