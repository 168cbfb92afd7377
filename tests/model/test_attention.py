"""attention() against the formula, written out; masks against their definition."""

import pytest
import torch
from torch import Tensor

from peagle.model.attention import AttentionSpec, CausalAttend, attention, causal_mask

T, S, N, M, H = 5, 9, 6, 2, 8
CPU = torch.device("cpu")
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -4.0])
SPECS = {
    "plain": AttentionSpec(0.3),
    "softcap": AttentionSpec(0.9, softcap=1.5),
    "sinks": AttentionSpec(0.3, sinks=SINKS),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Row by row, head by head, exponentials and their sum."""
    out = torch.zeros(*q.shape[:2], v.shape[-1])
    for token in range(len(q)):
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            scores = k[:, shared] @ q[token, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            weights = scores.exp() if mask is None else scores.exp() * mask[token]
            total = weights.sum()
            if spec.sinks is not None:
                total = total + spec.sinks[head].exp()
            out[token, head] = weights @ v[:, shared] / total
    return out


@pytest.mark.parametrize(("masked", "width"), [(True, H), (False, H), (False, 5)])
@pytest.mark.parametrize("name", SPECS)
def test_attention_is_the_formula(name: str, masked: bool, width: int) -> None:
    """Values may be narrower than keys."""
    q, k, v = draw(T, N, H, seed=0), draw(S, M, H, seed=1), draw(S, M, width, seed=2)
    mask = causal_mask(S - T, T, 3, CPU) if masked else None
    found = attention(q, k, v, mask, SPECS[name])
    torch.testing.assert_close(found, naive(q, k, v, mask, SPECS[name]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 6), (4, 1), (4, 3)])
def test_causal_mask_is_its_definition(start: int, tokens: int, window: int | None) -> None:
    mask = causal_mask(start, tokens, window, CPU)
    for i in range(tokens):
        for key in range(start + tokens):
            visible = key <= start + i and (window is None or start + i - key < window)
            assert (mask is None or bool(mask[i, key])) == visible


def test_causal_attend_keeps_the_masks_of_different_windows_apart() -> None:
    q, k, v = draw(S, N, H, seed=0), draw(S, M, H, seed=1), draw(S, M, H, seed=2)
    attend = CausalAttend()
    for layer, window in enumerate([None, 2, None, 4]):
        spec = AttentionSpec(0.3, window)
        wanted = naive(q, k, v, causal_mask(0, S, window, CPU), spec)
        torch.testing.assert_close(attend(layer, q, k, v, spec), wanted, atol=1e-5, rtol=1e-5)
