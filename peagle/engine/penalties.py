"""Penalties for repeating, as vLLM's: each row of a draft counts the draft tokens on its path.

Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from peagle.engine.params import SamplingParams
from peagle.engine.tree import Draft


class Penalties:
    """Token counts of one sequence, and the penalties that they cause."""

    def __init__(self, params: SamplingParams, prompt: list[int], vocabulary: int) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._prompt = torch.zeros(vocabulary, dtype=torch.bool)
        self._prompt[prompt] = True
        self._counts = torch.zeros(vocabulary)  # in the output

    @staticmethod
    def of(params: SamplingParams, prompt: list[int], vocabulary: int) -> "Penalties | None":
        """None when nothing is penalised."""
        neutral = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return None if neutral == (1, 0, 0) else Penalties(params, prompt, vocabulary)

    def count(self, tokens: list[int]) -> None:
        """Tokens were emitted."""
        at = torch.tensor(tokens, dtype=torch.int64, device=self._counts.device)
        self._counts.index_put_((at,), self._counts.new_ones(()), accumulate=True)

    def apply(self, logits: Tensor, draft: Draft) -> Tensor:  # (R, V) float32, R − 1 nodes
        """Each row is penalised for prompt, output and path: repetition, frequency, presence."""
        self._prompt = self._prompt.to(logits.device)
        self._counts = self._counts.to(logits.device)
        counts = self._counts.repeat(len(logits), 1)
        paths = enumerate(draft.tails())
        drafted = [(row, draft.tokens[at - 1]) for row, tail in paths for at in tail]
        if drafted:
            row, token = torch.tensor(drafted, device=logits.device).unbind(1)
            counts.index_put_((row, token), counts.new_ones(()), accumulate=True)
        emitted = counts > 0
        if self._repetition != 1:
            factor = torch.where(logits > 0, 1 / self._repetition, self._repetition)
            logits = torch.where(emitted | self._prompt, logits * factor, logits)
        return logits - self._frequency * counts - self._presence * emitted
