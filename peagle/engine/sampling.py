"""From target logits to tokens: accept the draft, then one token of the target's own.

Shapes: R rows, V vocabulary, K draft tokens.

A draft token is the drafter's argmax, so its proposal is one-hot and speculative sampling
(Leviathan et al., Chen et al. 2023) becomes: accept d with probability p(d), else draw from p
without d. Every emitted token then has the target's distribution p, whatever was proposed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.request import SamplingParams


class Verdict(NamedTuple):
    """Draft tokens kept, and the target's own token behind them."""

    accepted: int
    token: int


def target_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits (R, V) → float32 probabilities (R, V) after temperature, min-p, top-k and top-p."""
    assert params.temperature > 0, "greedy decoding takes the argmax"
    logits = logits.float() / params.temperature
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        least = params.min_p * probabilities.max(-1, keepdim=True).values
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits.softmax(-1)


def verify(
    logits: Tensor,
    best: list[int],
    draft: list[int],
    params: SamplingParams,
    generator: torch.Generator,
) -> Verdict:
    """Judge a draft of K tokens by the K + 1 target rows `logits` (K + 1, V), whose argmaxes are
    `best`.

    Greedy keeps the longest prefix that equals the target's argmax.
    """
    assert len(logits) == len(draft) + 1
    if params.temperature == 0:
        accepted = 0
        while accepted < len(draft) and draft[accepted] == best[accepted]:
            accepted += 1
        return Verdict(accepted, best[accepted])
    probabilities = target_probabilities(logits, params).cpu()
    for position, token in enumerate(draft):
        p = probabilities[position]
        if torch.rand((), generator=generator) < p[token]:
            continue
        p[token] = 0  # the residual of a one-hot proposal; multinomial normalises
        return Verdict(position, _draw(p, generator))
    return Verdict(len(draft), _draw(probabilities[-1], generator))


def _draw(weights: Tensor, generator: torch.Generator) -> int:
    return int(weights.multinomial(1, generator=generator))
