"""From target logits to tokens: accept the draft, then one token of the target's own.

Shapes: R rows, V vocabulary.

A draft tree is fixed before the target's choices are known. So the target chooses for every row as
if it decoded alone: the argmax of p, or a draw from p by one number of the sequence's own for each
place of its output. The child of the row that has the chosen token, if there is one, is accepted,
and its row goes on. That is speculative sampling (Leviathan et al., Chen et al. 2023) of proposals
without chance: the same distribution, and a seed gives the same output with a tree, a chain and
without drafting. Bias, penalties and grammar are part of p: each row counts the tokens before
it on its path.
"""

from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.backends.ranking import ranking
from peagle.engine.grammar import Matcher
from peagle.engine.params import RequestFailure, SamplingParams, TokenLogprob
from peagle.engine.tree import Draft
from peagle.errors import InputError

NOT_A_NUMBER = "the target's logits are NaN or infinite: no token can be chosen"
NUCLEUS = 1024  # likeliest tokens that are tried before the whole vocabulary is sorted


class Choice(NamedTuple):
    """The target's choices for the R rows of one sequence."""

    tokens: list[int]
    finite: list[bool]  # False: the row's logits are NaN or infinite, so no token can be chosen


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: list[int],
        generator: torch.Generator,  # on the CPU, whatever device logits are on
        vocabulary: int,
        matcher: Matcher | None = None,
    ) -> None:
        """Raises InputError for token ids that the target does not have."""
        bias = params.logit_bias or {}
        check_tokens(bias, vocabulary, "logit_bias")
        check_tokens(params.stop_token_ids, vocabulary, "stop_token_ids")
        self.params = params
        self.matcher = matcher
        self._generator = generator
        self._vocabulary = vocabulary
        self._numbers = torch.empty(0, dtype=torch.float64)  # drawn so far, by output position
        self._emitted = 0
        strengths = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._penalties = None if strengths == (1, 0, 0) else Penalties(params, prompt)
        self._biased = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

    @property
    def plain(self) -> bool:
        """Tokens are the argmax of the logits as they are: `choose` would do as `greedy` does."""
        special = self.params.logit_bias or self._penalties or self.matcher
        return self.params.greedy and not special

    def choose(self, logits: Tensor, draft: Draft) -> Choice:
        """The target's token after the newest one and after each of a draft's R − 1 nodes, by its
        logits (R, V). Raises RequestFailure when the grammar has failed."""
        assert logits.shape == (len(draft) + 1, self._vocabulary)
        rows = self._rows(logits, draft)
        if self.params.greedy:
            return greedy(rows)
        cumulative = target_probabilities(rows, self.params).double().cumsum(-1)
        total = cumulative[:, -1]
        numbers = self._uniform(draft.depths()).to(rows.device)
        drawn = torch.searchsorted(cumulative, (numbers * total)[:, None], right=True)[:, 0]
        return Choice(drawn.tolist(), total.isfinite().tolist())

    def commit(self, tokens: list[int]) -> None:
        """Count emitted tokens."""
        self._emitted += len(tokens)
        if self._penalties is not None:
            self._penalties.count(tokens)
        if self.matcher is not None:
            self.matcher.advance(tokens)

    def _rows(self, logits: Tensor, draft: Draft) -> Tensor:
        """Logits after bias, penalties and grammar, before temperature."""
        rows = logits.float()
        if len(self._biased):
            at = self._biased.to(rows.device)
            rows = rows.index_add(1, at, self._bias.to(rows.device).expand(len(rows), -1))
        if self._penalties is not None:
            rows = self._penalties.apply(rows, draft)
        if self.matcher is not None:
            allowed = self.matcher.masks(draft).to(rows.device)
            rows = rows.masked_fill(~allowed, float("-inf"))
        return rows

    def _uniform(self, depths: list[int]) -> Tensor:
        """Uniform numbers in [0, 1) for output positions `next + depth`."""
        if missing := max(0, self._emitted + max(depths) + 1 - len(self._numbers)):
            more = torch.rand(missing + 64, generator=self._generator, dtype=torch.float64)
            self._numbers = torch.cat([self._numbers, more])
        return self._numbers[torch.tensor(depths) + self._emitted]

    def logprobs(self, logits: Tensor, rows: list[int], tokens: list[int]) -> list[TokenLogprob]:
        """Log-probabilities of tokens chosen at rows of the target's logits (R, V); empty unless
        requested."""
        count = self.params.logprobs
        if count is None:
            return []
        logs = logits[rows].float().log_softmax(-1)
        chosen = logs[range(len(tokens)), tokens].tolist()
        top = logs.topk(min(count, self._vocabulary))
        likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            TokenLogprob(token, value, list(zip(*best, strict=True)))
            for token, value, best in zip(tokens, chosen, likeliest, strict=True)
        ]


class Penalties:
    """Penalties for repetition, as in vLLM, from the token counts of one sequence.
    Each row of a draft counts the draft tokens on its path. Between rounds ids are kept, not
    counts (V,): thousands of requests may wait, or have ended and be kept for their answers."""

    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        self._params = params
        self._prompt = torch.tensor(list(set(prompt)), dtype=torch.int64)
        self._output = torch.empty(0, dtype=torch.int64)

    def count(self, tokens: list[int]) -> None:
        """Tokens were emitted."""
        self._output = torch.cat([self._output, torch.tensor(tokens, dtype=torch.int64)])

    def apply(self, logits: Tensor, draft: Draft) -> Tensor:  # (R, V) float32, R − 1 nodes
        """Each row is penalised for prompt, output and path: repetition, frequency, presence."""
        counts = _counts(self._output, logits).repeat(len(logits), 1)
        paths = enumerate(draft.tails())
        drafted = [(row, draft.tokens[at - 1]) for row, tail in paths for at in tail]
        if drafted:
            row, token = torch.tensor(drafted, device=logits.device).unbind(1)
            counts.index_put_((row, token), counts.new_ones(()), accumulate=True)
        emitted = counts > 0
        params = self._params
        if params.repetition_penalty != 1:
            seen = emitted | (_counts(self._prompt, logits) > 0)
            strength = params.repetition_penalty
            factor = torch.where(logits > 0, 1 / strength, strength)
            logits = torch.where(seen, logits * factor, logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * emitted


def _counts(ids: Tensor, logits: Tensor) -> Tensor:
    """The number of times (V,) that each token is among ids, on the device of logits (R, V)."""
    counts = torch.zeros_like(logits[0])
    return counts.index_put_((ids.to(logits.device),), counts.new_ones(()), accumulate=True)


def check_tokens(ids: Iterable[int], vocabulary: int, field: str) -> None:
    """Raises InputError of `field` for a token id that the target does not have."""
    for token in ids:
        if not hasattr(token, "__index__") or not 0 <= token < vocabulary:
            why = f"the target's token ids are 0 to {vocabulary - 1}"
            raise InputError(why, field=field, value=token)


def greedy(logits: Tensor) -> Choice:
    """The argmax of rows (R, V)."""
    largest, best = ranking(logits).best(logits)
    return Choice(best.tolist(), largest.isfinite().tolist())


def accepted_rows(choice: Choice, draft: Draft) -> list[int]:
    """The rows of the accepted nodes: the path that the target's choices follow, up to a row that
    could not choose. Its token is computed again, as the newest one.

    Raises RequestFailure when row 0 could not choose.
    """
    if not choice.finite[0]:
        raise RequestFailure(NOT_A_NUMBER)
    return list(takewhile(choice.finite.__getitem__, draft.path(choice.tokens)))


def target_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits (R, V) → float32 probabilities (R, V) after temperature, min-p, top-k and top-p."""
    assert not params.greedy, "greedy decoding takes the argmax"
    logits = logits.float() / params.temperature
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        smallest = params.min_p * probabilities.max(-1, keepdim=True).values
        logits = logits.masked_fill(probabilities < smallest, float("-inf"))
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if params.top_p < 1:
        logits = _nucleus(logits, params.top_p)
    return logits.softmax(-1)


def _nucleus(logits: Tensor, mass: float) -> Tensor:
    """The likeliest tokens of each row whose probabilities reach `mass`, with all that are as
    likely as the last of them, so that no row depends on the others; the rest are −inf.

    Sorting a whole vocabulary takes as long as a small target's forward; the likeliest tokens
    nearly always suffice, and are then the same ones.
    """
    probabilities = logits.softmax(-1)
    ordered = probabilities.topk(min(NUCLEUS, logits.shape[-1])).values
    if (ordered.sum(-1) < mass).any():
        ordered = probabilities.sort(descending=True).values
    keep = ordered.cumsum(-1) - ordered < mass
    keep[:, 0] = True  # the mass may be less than a float32 can be
    smallest = ordered.masked_fill(~keep, 1.0).amin(-1, keepdim=True)
    return logits.masked_fill(probabilities < smallest, float("-inf"))
