"""Training a correction: alone on a head that stays as it is, or together with the head."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from corrected_heads import corrected
from tiny import make_drafter, make_target, own_answers

from peagle.data.example import Example
from peagle.heads.load import load_drafter
from peagle.methods.registry import METHODS
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.batches import PackedDocuments
from peagle.train.config import TrainConfig
from peagle.train.elements import sample_elements
from peagle.train.passes import run_drafter, run_target
from peagle.train.resume import resume
from peagle.train.spec import HeadSpec
from peagle.train.trainee import Trainee
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter, with_correction

DEPTHS = 4
STEPS = 96  # four epochs


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(layers=7)


@pytest.fixture(scope="module")
def data(target: Target) -> list[Example]:
    return own_answers(target, 24)


@pytest.fixture
def head(target: Target, data: list[Example]) -> Drafter:
    spec = HeadSpec("p-eagle", depths=DEPTHS, draft_vocab=112, layers=1)
    return new_drafter(target, [example.ids for example in data], spec)


def run(
    output: Path, target: Target, head: Drafter, data: list[Example], stop: int = STEPS
) -> list[float]:
    """Train, or go on, and stop after some steps; the losses of the steps made."""
    config = TrainConfig(output, steps=STEPS, lr=1e-2, correction_lr=1e-2, save_every=10)
    trainer = Trainer(config, target, head, data)
    if (output / "checkpoints").exists():
        resume(trainer)
    losses = list[float]()

    def note(row: dict[str, Any]) -> None:
        losses.append(row["loss"])
        if row["step"] == stop:
            signal.raise_signal(signal.SIGINT)

    trainer.run(note)
    return losses


def test_a_frozen_head_stays_as_it_is(
    tmp_path: Path, target: Target, head: Drafter, data: list[Example]
) -> None:
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    made = with_correction(head, frozen=True)
    losses = run(tmp_path, target, made, data)
    assert sum(losses[-len(data) :]) < 0.9 * sum(losses[: len(data)]), "of the same documents"
    for name, tensor in before.items():
        assert torch.equal(made.state_dict()[name], tensor), name
    saved = load_drafter(tmp_path / "head", target)
    assert saved.correction is not None and saved.correction.token.weight.any()
    assert saved.config.provenance.data["correction_steps"] == STEPS


def test_exact_resume(tmp_path: Path, target: Target, head: Drafter, data: list[Example]) -> None:
    whole = with_correction(head, frozen=True)
    start = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    losses = run(tmp_path / "whole", target, whole, data)
    for stop, wanted in ((17, losses[:17]), (STEPS, losses[17:])):
        again = with_correction(head, frozen=True)
        again.load_state_dict(start)
        assert run(tmp_path / "parts", target, again, data, stop) == wanted
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("frozen", [True, False])
def test_value_and_gradients(target: Target, data: list[Example], frozen: bool) -> None:
    """Those of whole logits, in float64. Together with its head half of the loss is the head's
    without it."""
    drafter = corrected(make_drafter(target, "p-eagle")).double()
    drafter.requires_grad_(not frozen)
    drafter.correction.requires_grad_()
    ids = torch.tensor(data[0].ids)
    sequence = PackedDocuments(ids, torch.arange(len(ids)) >= 3, torch.zeros_like(ids))
    every = sample_elements(*sequence[1:], DEPTHS, 0.8, torch.Generator().manual_seed(0))
    elements = every.elements
    output = run_target(target, sequence, drafter.config.feature_layers)
    result = Trainee(drafter, target)(sequence, output, every)

    normed = run_drafter(drafter, sequence, output.features, elements)
    at = elements.anchor + elements.depth + 1
    inside = at + 1 < len(ids)
    inside &= sequence.supervised[(at + 1).clamp(max=len(ids) - 1)]
    at = at[inside]
    log_p = target.logits(output.hidden[at])[:, drafter.target_ids].double().log_softmax(-1)
    losses = []
    for before in [ids[at]] if frozen else [ids[at], None]:
        log_q = METHODS["p-eagle"].logits(drafter, normed[inside], before).log_softmax(-1)
        losses.append((log_p.exp() * (log_p - log_q)).sum())
    whole = torch.stack(losses).mean()
    torch.testing.assert_close(result.loss, whole, rtol=1e-6, atol=1e-6)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    assert (drafter.fc.weight.requires_grad, len(trained) == 3) == (not frozen, frozen)
    found = torch.autograd.grad(result.loss, trained)
    for mine, theirs in zip(found, torch.autograd.grad(whole, trained), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
