"""The correction adds its formula's value, to its candidates only."""

import pytest
import torch
import torch.nn.functional as F
from refusals import refused

from peagle.model.config import CorrectionConfig
from peagle.model.drafter import Correction

PLACES, TOKENS, HIDDEN, VOCABULARY = 5, 3, 8, 40
SIZES = CorrectionConfig(rank=4, candidates=6)


def make(sizes: CorrectionConfig = SIZES) -> Correction:
    torch.manual_seed(0)
    correction = Correction(sizes, HIDDEN, VOCABULARY).double()
    torch.nn.init.normal_(correction.token.weight)
    return correction


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, states and the embeddings of the tokens before."""
    generator = torch.Generator().manual_seed(1)
    shapes = (PLACES, VOCABULARY), (PLACES, HIDDEN), (PLACES, TOKENS, HIDDEN)
    logits, normed, before = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    return 2 * logits, normed, before


@torch.no_grad()
def test_the_formula() -> None:
    """Number by number, in float64."""
    correction = make()
    logits, normed, before = operands()
    candidates = correction.likeliest(logits)
    scores = correction(normed, candidates, correction.before(before))
    found = scores.softmax(-1)
    for place in range(PLACES):
        ids = sorted(range(VOCABULARY), key=lambda i: -logits[place, i])[: SIZES.candidates]
        assert candidates.ids[place].tolist() == ids
        for token in range(TOKENS):
            gate = F.silu(correction.state.weight @ normed[place])
            said = correction.before.weight @ before[place, token]
            sums = [logits[place, i] + sum(correction.token.weight[i] * gate * said) for i in ids]
            wanted = torch.stack(sums).softmax(0)
            torch.testing.assert_close(found[place, token], wanted)


@torch.no_grad()
def test_the_other_tokens_keep_their_probability() -> None:
    correction = make()
    logits, normed, before = operands()
    corrected = correction.apply_to(logits, normed, before[:, 0])
    others = torch.ones_like(logits, dtype=torch.bool)
    others.scatter_(-1, correction.likeliest(logits).ids, value=False)
    found, wanted = corrected.softmax(-1), logits.softmax(-1)
    torch.testing.assert_close(found[others], wanted[others])
    assert (found - wanted)[~others].abs().max() > 0.01
    assert torch.equal(corrected[others], logits[others])


@torch.no_grad()
def test_it_adds_nothing_before_it_is_trained() -> None:
    correction = Correction(SIZES, HIDDEN, VOCABULARY).double()
    logits, normed, before = operands()
    torch.testing.assert_close(correction.apply_to(logits, normed, before[:, 0]), logits)


def test_a_small_vocabulary_is_scored_whole() -> None:
    correction = make(CorrectionConfig(rank=4, candidates=64))
    logits, normed, before = operands()
    assert (
        correction(normed, correction.likeliest(logits), correction.before(before)).shape[-1]
        == VOCABULARY
    )


@pytest.mark.parametrize("sizes", [{"rank": 0}, {"candidates": -1}, {"rank": "many"}])
def test_sizes_are_checked(sizes: dict[str, int]) -> None:
    [name] = sizes
    with refused(f"correction.{name}"):
        CorrectionConfig(**sizes)
