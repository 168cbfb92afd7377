"""χ² of counted outcomes against exact probabilities, and rules of acceptance that are wrong."""

from collections import Counter
from collections.abc import Callable, Container

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from peagle.engine.params import SamplingParams
from peagle.engine.sampling import Choice, Sampler, target_probabilities
from peagle.engine.tree import Draft

Choose = Callable[[Sampler, Tensor, list[int]], Choice]
CHOOSE: Choose = Sampler.choose  # before a test puts a wrong one in its place


def p_value(counts: Counter[tuple[int, int]], joint: np.ndarray) -> float:
    """χ² p-value of pairs; cells expected fewer than 8 times are merged; 0 for the impossible."""
    draws = counts.total()
    expected = joint.flatten() / joint.sum() * draws
    observed = np.zeros_like(expected)
    for (first, second), n in counts.items():
        observed[first * joint.shape[1] + second] = n
    if observed[expected == 0].any():
        return 0.0
    common = expected >= 8
    merged = [(x[common], x[~common].sum()) for x in (observed, expected)]
    if merged[1][1] < 8:  # too rare even together: join the smallest common cell
        smallest = merged[1][0].argmin()
        cells = [np.array(kept) for kept, _ in merged]
        for cell, (_, rest) in zip(cells, merged, strict=True):
            cell[smallest] += rest
    else:
        cells = [np.append(kept, rest) for kept, rest in merged]
    return float(stats.chisquare(*cells).pvalue)


def naive_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row by its definition, in float64: temperature, min-p, top-k, top-p."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    p = np.where(p < params.min_p * p.max(), 0, p)
    if params.top_k:
        p = np.where(p < np.sort(p)[-min(params.top_k, len(p))], 0, p)
    p /= p.sum()
    kept, mass = np.zeros_like(p), 0.0
    for token in np.argsort(-p):
        if mass < params.top_p:
            kept[token] = p[token]
            mass += p[token]
    return kept / kept.sum()


def naive_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    allowed: Container[int] | None = None,
) -> np.ndarray:
    """One row by its definition, token by token: bias, penalties, grammar."""
    adjusted = logits.astype(np.float64).copy()
    for token in range(len(adjusted)):
        adjusted[token] += (params.logit_bias or {}).get(token, 0)
        if token in prompt or token in output:
            up = adjusted[token] > 0
            adjusted[token] *= 1 / params.repetition_penalty if up else params.repetition_penalty
        if token in output:
            adjusted[token] -= params.frequency_penalty * output.count(token)
            adjusted[token] -= params.presence_penalty
        if allowed is not None and token not in allowed:
            adjusted[token] = -np.inf
    return adjusted


def always_accept(sampler: Sampler, logits: Tensor, draft: Draft) -> Choice:
    """Wrong: whatever was drafted is kept."""
    rows = sampler._rows(logits, draft)[-1:]
    p = target_probabilities(rows, sampler.params)[0]
    last = int(p.multinomial(1, generator=sampler._generator))
    return Choice([*draft.tokens, last], [True] * len(logits))


def keep_residual(sampler: Sampler, logits: Tensor, draft: Draft) -> Choice:
    """Wrong: after a rejection the rejected token may be drawn again."""
    rows = target_probabilities(sampler._rows(logits, draft), sampler.params)
    tokens = rows.multinomial(1, generator=sampler._generator)[:, 0].tolist()
    for position, drafted in enumerate(draft.tokens):
        if torch.rand((), generator=sampler._generator) < rows[position, drafted]:
            tokens[position] = drafted
    return Choice(tokens, [True] * len(logits))


BROKEN = {"always": always_accept, "residual": keep_residual}
