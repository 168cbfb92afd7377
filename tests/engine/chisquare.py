"""χ² of counted outcomes against exact probabilities, and rules of acceptance that are wrong."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from peagle.engine.request import SamplingParams
from peagle.engine.sampling import Verdict, target_probabilities, verify

Verify = Callable[[Tensor, list[int], SamplingParams, torch.Generator], Verdict]


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


def always_accept(
    logits: Tensor, draft: list[int], params: SamplingParams, generator: torch.Generator
) -> Verdict:
    """Wrong: whatever was drafted is kept."""
    return Verdict(len(draft), verify(logits[-1:], [], params, generator).token)


def keep_residual(
    logits: Tensor, draft: list[int], params: SamplingParams, generator: torch.Generator
) -> Verdict:
    """Wrong: after a rejection the rejected token may be drawn again."""
    for position, token in enumerate(draft):
        p = target_probabilities(logits[position : position + 1], params)[0]
        if torch.rand((), generator=generator) >= p[token]:
            return Verdict(position, int(p.multinomial(1, generator=generator)))
    return Verdict(len(draft), verify(logits[-1:], [], params, generator).token)


BROKEN = {"always": always_accept, "residual": keep_residual}
