"""Where two greedy decodings differ first, and whether the target was undecided there."""

from typing import NamedTuple

import torch

from peagle.model.attention import CausalAttend
from peagle.model.target import Target

# A smaller gap between the target's two best logits is rounding.
TIES = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}


class Difference(NamedTuple):
    """The first difference of one prompt."""

    prompt: int
    position: int  # in the output
    tokens: tuple[int | None, int | None]  # expected, found; None: had ended
    gap: float  # between the target's own two best logits there
    tie: bool  # the gap is rounding, and the tokens are those two


def differences(
    target: Target, prompts: list[list[int]], expected: list[list[int]], found: list[list[int]]
) -> list[Difference]:
    """Find the first differences of outputs `found` from `expected`, judged by `target`."""
    pairs = enumerate(zip(prompts, expected, found, strict=True))
    return [_judge(target, i, prompt, a, b) for i, (prompt, a, b) in pairs if a != b]


def _judge(
    target: Target, index: int, prompt: list[int], expected: list[int], found: list[int]
) -> Difference:
    shared = zip(expected, found, strict=False)
    length = min(len(expected), len(found))
    position = next((at for at, (a, b) in enumerate(shared) if a != b), length)
    tokens = tuple(ids[position] if position < len(ids) else None for ids in (expected, found))
    best, gap = _two_best(target, prompt + expected[:position])
    tie = gap < TIES[target.dtype] and set(tokens) == best
    return Difference(index, position, tokens, gap, tie)  # type: ignore[arg-type]


@torch.no_grad()
def _two_best(target: Target, ids: list[int]) -> tuple[set[int], float]:
    """The two likeliest next tokens, and the gap between their logits."""
    packed = torch.tensor(ids, device=target.device)
    at = torch.arange(len(ids), device=target.device)
    hidden = target.forward(packed, at, CausalAttend()).hidden
    top = target.logits(hidden[-1:])[0].float().topk(2)
    return set(top.indices.tolist()), float(top.values[0] - top.values[1])
