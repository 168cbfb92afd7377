"""From target logits to tokens: accept the draft, then one token of the target's own.

Shapes: R rows, V vocabulary.

A draft token is the drafter's argmax, so its proposal is one-hot and speculative sampling
(Leviathan et al., Chen et al. 2023) becomes: accept d with probability p(d), else draw from p
without d. Here a token is drawn from p first, by one number of the sequence's own for each place
of its output, and a draft token stands when it is the one drawn: the same law, and what is said
with a seed does not depend on what was drafted, nor on whether anything was. Bias, penalties and
grammar are part of p: each row has what the tokens before it, drafted ones too, make of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.config import InputError
from peagle.engine.grammar import Matcher
from peagle.engine.penalties import Penalties
from peagle.engine.request import RequestFailure, SamplingParams, TokenLogprob

NOT_A_NUMBER = "the target's logits are NaN or infinite: no token can be chosen"
NUCLEUS = 1024  # likeliest tokens that are tried before the whole vocabulary is sorted


class Verdict(NamedTuple):
    """Draft tokens kept, and the target's own token behind them."""

    accepted: int
    token: int
    logprobs: list[TokenLogprob] | None = None  # of all of them, where asked for


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
        for name, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids)):
            if wrong := [token for token in ids if not 0 <= token < vocabulary]:
                most = vocabulary - 1
                raise InputError(f"{name} {wrong[0]}: the target's token ids are 0 to {most}")
        self.params, self.matcher = params, matcher
        self._generator, self._vocabulary = generator, vocabulary
        self._numbers, self._said = torch.empty(0, dtype=torch.float64), 0
        self._penalties = Penalties.of(params, prompt, vocabulary)
        self._biased = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

    @property
    def plain(self) -> bool:
        """Tokens are the argmax of the logits as they are; `verify` would do no more than
        `accept_prefix`."""
        special = self.params.logit_bias or self._penalties or self.matcher
        return self.params.greedy and not special and self.params.logprobs is None

    def verify(self, logits: Tensor, draft: list[int]) -> Verdict:
        """Judge a draft of R − 1 tokens by the R target rows `logits` (R, V).

        Raises RequestFailure when no token can be chosen, the logits being NaN or infinite.
        """
        assert logits.shape == (len(draft) + 1, self._vocabulary)
        rows = self._rows(logits, draft)
        if self.params.greedy:
            best = rows.argmax(-1)
            accepted, token = accept_prefix(best.tolist(), draft)
            check_finite(rows.gather(1, best[:, None])[: accepted + 1])
        else:
            accepted, token = self._draw(rows, draft)
        return Verdict(accepted, token, self._logprobs(logits, [*draft[:accepted], token]))

    def commit(self, tokens: list[int]) -> None:
        """These emitted tokens stay."""
        self._said += len(tokens)
        if self._penalties is not None:
            self._penalties.count(tokens)
        if self.matcher is not None:
            self.matcher.advance(tokens)

    def _rows(self, logits: Tensor, draft: list[int]) -> Tensor:
        """What tokens are chosen by, before temperature: bias, penalties, grammar."""
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

    def _draw(self, rows: Tensor, draft: list[int]) -> tuple[int, int]:
        """Draw a token of each row; the draft stands as far as it is what was drawn."""
        below = target_probabilities(rows, self.params).double().cumsum(-1)
        at = self._uniform(len(rows)).to(rows.device)[:, None] * below[:, -1:]
        drawn = torch.searchsorted(below, at, right=True)[:, 0]
        accepted, token = accept_prefix(drawn.tolist(), draft)
        check_finite(below[: accepted + 1, -1])
        return accepted, token

    def _uniform(self, count: int) -> Tensor:
        """Numbers in [0, 1) of the next places of the output (count,)."""
        if missing := max(0, self._said + count - len(self._numbers)):
            more = torch.rand(missing + 64, generator=self._generator, dtype=torch.float64)
            self._numbers = torch.cat([self._numbers, more])
        return self._numbers[self._said : self._said + count]

    def _logprobs(self, logits: Tensor, tokens: list[int]) -> list[TokenLogprob] | None:
        count = self.params.logprobs
        if count is None:
            return None
        rows = logits[: len(tokens)].float().log_softmax(-1)
        at = torch.tensor(tokens, device=rows.device)[:, None]
        own = rows.gather(1, at)[:, 0].tolist()
        top = rows.topk(min(count, self._vocabulary))
        likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            TokenLogprob(token, value, list(zip(*best, strict=True)))
            for token, value, best in zip(tokens, own, likeliest, strict=True)
        ]


def accept_prefix(chosen: list[int], draft: list[int]) -> tuple[int, int]:
    """(accepted, token): the longest prefix of the draft that is what the rows chose, and what the
    row behind it chose."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return accepted, chosen[accepted]


def target_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits (R, V) → float32 probabilities (R, V) after temperature, min-p, top-k and top-p."""
    assert not params.greedy, "greedy decoding takes the argmax"
    logits = logits.float() / params.temperature
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        least = params.min_p * probabilities.max(-1, keepdim=True).values
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if params.top_p < 1:
        logits = _nucleus(logits, params.top_p)
    return logits.softmax(-1)


def _nucleus(logits: Tensor, mass: float) -> Tensor:
    """The likeliest tokens of each row whose probabilities reach `mass`; the others are −inf.

    Sorting a whole vocabulary takes as long as a small target's forward; the likeliest tokens
    nearly always suffice, and are then the same ones.
    """
    probabilities = logits.softmax(-1)
    ordered, order = probabilities.topk(min(NUCLEUS, logits.shape[-1]))
    if (ordered.sum(-1) < mass).any():
        ordered, order = probabilities.sort(descending=True)
    keep = ordered.cumsum(-1) - ordered < mass
    keep[:, 0] = True  # the mass may be less than a float32 can be
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, keep)
    return logits.masked_fill(~kept, float("-inf"))


def check_finite(most: Tensor) -> None:
    """Raise RequestFailure unless `most` are numbers, the largest logits of rows that were read or
    the sums of their probabilities: a row's is NaN, or infinite, when no token can be chosen."""
    if not most.isfinite().all():
        raise RequestFailure(NOT_A_NUMBER)
