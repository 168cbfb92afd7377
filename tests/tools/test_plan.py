"""The plan adds up what training keeps, from the configuration alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tiny import METHODS, make_target

from peagle.model.partial import outline
from peagle.tools import plan as plans
from peagle.tools.plan import ADAMW, ALLOCATOR_GAPS, GIB, Plan, Training, measured_rate, plan
from peagle.train.spec import HeadSpec
from peagle.train.state import append_line
from peagle.train.warm_start import new_drafter

TAPS = (1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only a configuration: no weights are needed."""
    made: Path = tmp_path_factory.mktemp("target")
    config = make_target().config
    config.dtype = torch.float32
    config.save_pretrained(made)
    return made


@pytest.fixture(autouse=True)
def small_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the memory of the Python process, which grows with the tests that ran before."""
    monkeypatch.setattr(plans, "_runtime", lambda: 100_000_000)


def make(folder: Path, method: str = "p-eagle", room: float = GIB, **changes: Any) -> Plan:
    spec = HeadSpec(method, layers=2, depths=4, draft_vocab=100, feature_layers=TAPS)
    training = Training(tokens=10_000, context=200, memory=room / GIB)
    return plan(str(folder), spec, replace(training, **changes))


@pytest.mark.parametrize("method", METHODS)
def test_parts(folder: Path, method: str) -> None:
    target, made = make_target(), make(folder, method)
    assert made.memory["target"] == sum(p.numel() * 4 for p in target.model.parameters())
    spec = HeadSpec(method, layers=2, depths=4, draft_vocab=100, feature_layers=TAPS)
    trained = sum(p.numel() for p in new_drafter(target, [[7, 8, 9]], spec).parameters())
    assert made.memory["drafter and optimizer"] == ADAMW * trained
    assert made.memory["target states"] == 200 * 4 * 32 * 4, "three features and the last state"
    assert made.captured == 10_000 * (4 * 32 * 2 + 4 + 1), "bf16, and each token's id and flag"
    comes = ("target states", "loss", "activations")
    assert made.memory["allocator"] == int(ALLOCATOR_GAPS * sum(made.memory[p] for p in comes))
    assert made.total == sum(made.memory.values()) and made.hours is made.cost is None


def test_less_room_means_more_segments(folder: Path) -> None:
    whole = make(folder)
    assert whole.segments == 1
    tight = make(folder, room=whole.total - 100_000)
    assert tight.segments > 1 and tight.total <= whole.total - 100_000
    assert make(folder, segments=3).segments == 3


def test_prompts_are_not_trained_on(folder: Path) -> None:
    """They have no deeper elements, but features of their own."""
    whole, half = make(folder), make(folder, answered=0.5)
    assert half.memory["activations"] < 0.9 * whole.memory["activations"]
    assert half.memory["loss"] < whole.memory["loss"], "but for a chunk of logits"
    assert half.memory["target states"] == whole.memory["target states"]
    assert half.captured == 2 * whole.captured


def test_cuda_has_no_runtime(folder: Path) -> None:
    memory = make(folder, gpus=1).memory
    assert memory["allocator"] == memory["runtime"] == 0


def test_a_cpu_without_products_of_bf16_keeps_float32(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For training here; a GPU multiplies bf16."""

    def activations(fast: bool, gpus: int) -> int:
        monkeypatch.setattr(plans, "multiplies_bf16", lambda _: fast)
        return make(folder, gpus=gpus).memory["activations"]

    assert activations(False, 0) > 1.3 * activations(True, 0)
    assert activations(False, 1) == activations(True, 1)


def test_hours_from_a_run(folder: Path, tmp_path: Path) -> None:
    """The first half warms up; processes share the tokens."""
    for step, (tokens, seconds) in enumerate([(10, 9.0), (20, 10.0), (60, 12.0)], start=1):
        line = {"step": step, "answer_tokens": tokens, "seconds": seconds}
        append_line(tmp_path / "metrics.jsonl", line)
    assert measured_rate(tmp_path) == 20
    with (tmp_path / "metrics.jsonl").open("a") as going_on:
        going_on.write('{"step": 4, "answer_to')
    assert measured_rate(tmp_path) == 20
    made = make(folder, run=tmp_path, gpus=2, price=3.0)
    assert made.hours == pytest.approx(10_000 / 40 / 3600)
    assert made.cost == pytest.approx(made.hours * 2 * 3.0)


def test_hours_from_a_run_of_several_processes(folder: Path, tmp_path: Path) -> None:
    """Its metrics count the tokens of all of them."""
    for step, (tokens, seconds) in enumerate([(20, 10.0), (60, 12.0)], start=1):
        line = {"step": step, "answer_tokens": tokens, "processes": 4, "seconds": seconds}
        append_line(tmp_path / "metrics.jsonl", line)
    assert measured_rate(tmp_path) == 5
    for gpus in (1, 4):
        hours = make(folder, run=tmp_path, gpus=gpus).hours
        assert hours == pytest.approx(10_000 / (5 * gpus) / 3600)


def test_the_memory_of_this_machine_is_that_of_its_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "main_memory", lambda: (8 * GIB, GIB))
    assert Training(tokens=10, context=10).room == 8 * GIB
    assert Training(tokens=10, context=10, gpus=1).room == 80 * GIB
    assert Training(tokens=10, context=10, memory=2.5).room == 2.5 * GIB


def test_runs_that_say_nothing(tmp_path: Path) -> None:
    with refused("run"):
        measured_rate(tmp_path)
    append_line(tmp_path / "metrics.jsonl", {"step": 1, "answer_tokens": 1, "seconds": 1.0})
    with refused("run"):
        measured_rate(tmp_path)


@pytest.mark.parametrize("field", ["gpus", "tokens", "segments", "context"])
def test_counts_that_are_too_small(field: str) -> None:
    with refused(field):
        Training(**{"tokens": 10, "context": 10, field: -1})


@pytest.mark.parametrize("field", ["answered", "memory", "price"])
@pytest.mark.parametrize("value", [0.0, -5.0, math.nan, math.inf])
def test_amounts_that_are_none(field: str, value: float) -> None:
    with refused(field):
        Training(**{"tokens": 10, "context": 10, field: value})


def test_outline_has_no_weights(folder: Path) -> None:
    assert {p.device for p in outline(str(folder)).model.parameters()} == {torch.device("meta")}
    with refused("target"):
        outline("nobody")
