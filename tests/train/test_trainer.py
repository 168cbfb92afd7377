"""Training learns, stops when asked, and resumes as if it had never stopped."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from json_files import read_lines
from refusals import refused
from tiny import METHODS, make_drafter, make_target, make_tokenizer
from torch import Tensor

from peagle.data.example import Example
from peagle.heads.load import load_drafter
from peagle.model.target import Target
from peagle.train import state as state_module
from peagle.train.config import TrainConfig
from peagle.train.resume import resume, start_from_here
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.walk import Walk, acceptance
from peagle.train.warm_start import new_drafter

SIZES: dict[str, Any] = {"layers": 2, "depths": 4, "draft_vocab": 100, "feature_layers": (1, 2, 3)}
Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path, target: Target, data: list[Example]) -> Make:
    """Makes a trainer whose run is in `tmp_path`; everything is new, as in another process."""

    def trainer(
        method: str = "p-eagle",
        measured: int = 0,
        run: str = "",
        documents: list[Example] = data,
        made_for: Target = target,
        head: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Trainer:
        torch.manual_seed(0)
        config = TrainConfig(tmp_path / run, **({"steps": 12} | settings))
        spec = HeadSpec(method, **(SIZES | (head or {})))
        drafter = new_drafter(made_for, [e.ids for e in documents], spec)
        measure = partial(acceptance, Walk(made_for, documents[:measured])) if measured else None
        return Trainer(config, made_for, drafter, documents, measure)

    return trainer


def resumed(trainer: Trainer) -> Trainer:
    resume(trainer)
    return trainer


def everything(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {name: t.clone() for name, t in trainer.drafter.state_dict().items()}
    for name, parameter in trainer.drafter.named_parameters():
        for kind, value in trainer.optimizer.state[parameter].items():
            tensors[f"{name}/{kind}"] = value.clone()
    average = trainer.average.weights
    return tensors | {f"{name}/average": tensor.clone() for name, tensor in average.items()}


def stop_at(step: int, number: signal.Signals = signal.SIGINT) -> Any:
    def on_step(metrics: dict[str, Any]) -> None:
        if metrics["step"] == step:
            os.kill(os.getpid(), number)

    return on_step


@pytest.mark.parametrize("method", METHODS)
def test_training_learns(make: Make, method: str) -> None:
    losses = list[float]()
    trainer = make(method, steps=60, lr=3e-3)
    trainer.run(lambda metrics: losses.append(metrics["loss"]))
    assert len(losses) == 60 and trainer.finished
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


PACKED = {"batch": 2, "pack": 60, "segments": 3, "eval_every": 4}


@pytest.mark.parametrize(
    ("method", "more"), [("p-eagle", {}), ("p-eagle", PACKED), ("eagle3", PACKED)]
)
def test_resume_is_exact(tmp_path: Path, make: Make, method: str, more: dict[str, Any]) -> None:
    straight = make(method, 2, run="straight", **more)
    straight.run()
    first = make(method, 2, run="halves", **more)
    first.run(stop_at(5))
    assert (first.progress.step, first.finished) == (5, False)
    second = make(method, 2, run="halves", **more)
    with torch.no_grad():  # nothing of the new process survives
        for parameter in second.drafter.parameters():
            parameter.normal_()
    resume(second)
    second.run()
    one, two = everything(straight), everything(second)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    lines = [metrics_of(tmp_path / name) for name in ("straight", "halves")]
    without_time = [[{**m, "seconds": 0} for m in part] for part in lines]
    assert without_time[0] == without_time[1]
    assert [m["step"] for m in lines[1]] == list(range(1, 13))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_checkpoint_and_head(
    tmp_path: Path, make: Make, target: Target, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    trainer = make()
    trainer.run(stop_at(3, number))
    assert signal.getsignal(number) is before
    assert trainer.progress.step == 3
    head = load_drafter(tmp_path / "head", target)
    assert head.config.provenance.data["steps"] == 3
    for name, tensor in (trainer.drafter.state_dict() | trainer.average.weights).items():
        close = head.state_dict()[name].to(torch.float64), tensor.to(torch.float64)
        torch.testing.assert_close(*close, rtol=0.01, atol=1e-3)
    again = resumed(make())
    assert again.progress.step == 3
    assert again.progress.answer_tokens == trainer.progress.answer_tokens > 0


def test_a_signal_waits_until_all_processes_know(make: Make) -> None:
    """After a step's counts the others are about to begin the next step, which needs this one."""
    trainer = make(batch=2)
    trainer.world = 2  # the other one has nothing to add
    trainer.run(stop_at(3))
    assert trainer.progress.step == 4


def test_a_signal_while_processes_count_is_not_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make()
    add_up, sums = trainer._sum, list[Tensor]()

    def interrupted(numbers: list[float]) -> Tensor:
        sums.append(add_up(numbers))
        if len(sums) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return sums[-1]

    monkeypatch.setattr(trainer, "_sum", interrupted)
    trainer.run()
    assert trainer.progress.step == 1


def test_a_run_that_starts_over_keeps_no_lines_of_the_last(tmp_path: Path, make: Make) -> None:
    """As one that was killed before its first checkpoint, and so has nothing to resume."""

    def kill(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make("eagle3", save_every=100).run(kill)
    assert [m["step"] for m in metrics_of(tmp_path)] == [1, 2, 3]
    again = make("eagle3", steps=2)
    start_from_here(again)
    again.run()
    assert [m["step"] for m in metrics_of(tmp_path)] == [1, 2]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_not_continued_with_other_settings_or_data(
    tmp_path: Path, make: Make, data: list[Example]
) -> None:
    make().run(stop_at(2))
    before = files(tmp_path)
    for name, value in {"decay": 0.7, "batch": 2, "ratio": 0.7, "seed": 3, "pack": 99}.items():
        with refused(name) as caught:
            resume(make(**{name: value}))
        assert caught.value.value == value
    with refused("data"):
        resume(make(documents=data[:-1]))
    trainer = make()
    trainer.progress.settings["correction"] = "frozen"
    with refused("correction"):
        resume(trainer)
    assert files(tmp_path) == before
    resume(make(lr=1e-5, keep=9, save_every=3))


OTHER_HEADS = {"feature_layers": (0, 1, 2), "depths": 3, "norm_output": False}
OTHER_CONFIGS = {"norm_before_residual": True, "logit_scale": 0.5, "mask_token_id": 4}
OTHER_LAYERS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "sliding_window": 1280,
    "num_attention_heads": 8, "rms_norm_eps": 1e-3, "hidden_act": "relu",
}  # fmt: skip


def test_a_run_is_not_continued_for_another_target_or_head(tmp_path: Path, make: Make) -> None:
    """Tensors of the same shapes do not show it."""
    make("eagle3").run(stop_at(2))
    before = files(tmp_path)
    for name, value in OTHER_HEADS.items():
        with refused(name):
            resume(make("eagle3", head={name: value}))
    for name, value in (OTHER_CONFIGS | OTHER_LAYERS).items():
        other = make("eagle3")
        config = other.drafter.config
        changes: dict[str, Any] = {name: value}
        if name in OTHER_LAYERS:
            changes = {"transformer": replace(config.transformer, **changes)}
        other.drafter.config = replace(config, **changes)
        other.progress.settings = other._settings()
        with refused(name):
            resume(other)
    with refused("method"):
        resume(make("p-eagle"))
    with refused("target"):
        resume(make("eagle3", made_for=make_target(seed=7)))
    other_template = make_target()
    other_template.tokenizer.chat_template = "{{ messages }}"
    with refused("chat_template"):
        resume(make("eagle3", made_for=other_template))
    assert files(tmp_path) == before


def test_a_checkpoint_that_does_not_name_its_target_and_head_resumes(make: Make) -> None:
    """As checkpoints did before."""
    first = make("eagle3")
    named = ("target", "chat_template", "method", "init_from", "init_from[data]")
    for name in (*named, *OTHER_HEADS, *OTHER_CONFIGS, *OTHER_LAYERS):
        del first.progress.settings[name]
    first.run(stop_at(2))
    second = resumed(make("eagle3"))
    assert second.progress.step == 2 and second.progress.settings["depths"] == 4


def test_documents_may_be_added(make: Make, data: list[Example]) -> None:
    """After those that are there; from then on they belong to the run. The draft vocabulary stays
    that of the first ones."""
    make(documents=data[:3]).run(stop_at(2))
    second = make()
    of_all = second.drafter.target_ids
    resume(second)
    assert not torch.equal(second.drafter.target_ids, of_all)
    assert torch.equal(second.sampler.vocabulary, second.drafter.target_ids)
    second.run(stop_at(4))
    with refused("data"):
        resume(make(documents=data[:3]))


def test_a_run_that_is_stopped_before_its_first_step_resumes(make: Make) -> None:
    """Its checkpoint holds an average of the weights, and no moments."""
    first = make()
    first._ask_to_stop()
    first.run()
    second = resumed(make())
    assert second.progress == first.progress and second.progress.step == 0
    second.run(stop_at(1))


def test_not_a_number_keeps_the_last_checkpoint(make: Make) -> None:
    trainer = make(save_every=2)

    def poison(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 5:
            trainer.drafter.fc.weight.data[0, 0] = float("nan")

    where = r"loss is nan at step 5 \(sequences 5 to 5\): the last good checkpoint is .*-00000004"
    with pytest.raises(FloatingPointError, match=where):
        trainer.run(poison)
    again = resumed(make())
    assert again.progress.step == 4
    assert all(torch.isfinite(p).all() for p in again.drafter.parameters())


def test_a_failed_write_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().run(stop_at(2))
    before = sorted(p.name for p in tmp_path.iterdir())

    def disk_full(tensors: dict[str, Tensor], file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(state_module, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
        resumed(make()).run(stop_at(4))
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert resumed(make()).progress.step == 2


def test_elements_are_drawn_anew_each_step(make: Make, data: list[Example]) -> None:
    """The same document, by (seed, step): repeatable, and never the same draw twice."""
    drawn = list[list[int]]()
    for seed, step in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        trainer = make(documents=data[:1], seed=seed)
        trainer.progress.step = step
        drawn.append(trainer._sample()[0].segments[0].elements.anchor.tolist())
    assert drawn[0] == drawn[3]
    assert drawn[0] != drawn[1] and drawn[0] != drawn[2] and drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 5),
        ({"epochs": 4}, 20),
        ({"epochs": 4, "batch": 2}, 10),
        ({"epochs": 2, "pack": 10_000}, 2),
        ({"steps": 7, "epochs": 4}, 7),
        ({"max_train_tokens": 5 * 24 * 3}, 15),
        ({"max_train_tokens": 1}, 1),
        ({"epochs": 10, "batch": 4}, 13),
        ({"max_train_tokens": 5 * 24 * 10, "batch": 4}, 13),
    ],
)
def test_total_steps(make: Make, settings: dict[str, int], steps: int) -> None:
    given = {"steps": None} | settings
    assert make(**given).total_steps == steps


PASSES = {"batch": 2, "pack": 60}


@pytest.mark.parametrize(
    ("one", "other", "bf16", "close"),
    [
        (PASSES | {"segments": 1}, PASSES | {"segments": 4}, False, {"rtol": 2e-3, "atol": 2e-5}),
        ({}, {"recompute": True}, True, {"rtol": 0, "atol": 0}),
    ],
)
def test_segments_and_recomputed_activations_change_nothing(
    make: Make, one: dict[str, Any], other: dict[str, Any], bf16: bool, close: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not bf16:
        monkeypatch.setattr("peagle.train.trainee.multiplies_bf16", lambda device: False)
    ends = []
    for name, settings in (("one", one), ("other", other)):
        trainer = make(run=name, steps=3, **settings)
        trainer.run()
        ends.append(everything(trainer))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], **close)


def test_the_best_head_by_acceptance_is_kept(tmp_path: Path, make: Make, target: Target) -> None:
    trainer = make(measured=2, steps=60, lr=3e-3, eval_every=20)
    trainer.run()
    lines = [m for m in metrics_of(tmp_path) if "acceptance_length" in m]
    assert [m["step"] for m in lines] == [20, 40, 60]
    assert max(m["acceptance_length"] for m in lines) > 1
    best = load_drafter(tmp_path / "best", target).config.provenance
    top = max(lines, key=lambda m: m["acceptance_length"])
    assert best.data["steps"] == top["step"]
    measured = best.acceptance["held out"]
    assert measured["acceptance_length"] == top["acceptance_length"]
    assert len(measured["accepted_per_position"]) == measured["k"] == SIZES["depths"]


def test_measured_answers_without_a_round(tmp_path: Path, make: Make, target: Target) -> None:
    trainer = make(steps=1)
    short = Example([5, 6, 7], [False, False, True])
    trainer.measure = partial(acceptance, Walk(target, [short]))
    trainer.run()
    [line] = metrics_of(tmp_path)
    assert (line["acceptance_length"], line["accepted_per_position"]) == (1.0, [])
    recorded = load_drafter(tmp_path / "head", target).config.provenance.acceptance
    assert recorded["held out"]["k"] == SIZES["depths"]


@pytest.mark.parametrize(("steps", "wanted"), [(4, [2, 4]), (5, [2, 4, 5])])
def test_the_last_step_is_saved_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, steps: int, wanted: list[int]
) -> None:
    trainer, saved = make(steps=steps, save_every=2), list[int]()
    monkeypatch.setattr(trainer, "save_head", lambda name: saved.append(trainer.progress.step))
    trainer.run()
    assert saved == wanted


def test_a_head_in_float32_shares_the_targets_table(tmp_path: Path, data: list[Example]) -> None:
    """Not a copy of it, as one that was loaded for a bf16 target and converted has."""
    half = Target(make_target().model.to(torch.bfloat16), make_tokenizer(), "tiny-bf16")
    drafter = make_drafter(half, "p-eagle").float()
    drafter.config = replace(drafter.config, depths=4)
    trainer = Trainer(TrainConfig(tmp_path, steps=1), half, drafter, data)
    trainer.run()
    for head in (trainer.drafter, trainer.averaged(torch.bfloat16)):
        assert head.shared_embedding is not None
        assert head.shared_embedding.data_ptr() == half.embedding.data_ptr()


def test_a_finished_run_that_is_resumed_keeps_its_measured_acceptance(
    tmp_path: Path, make: Make
) -> None:
    make(measured=2, steps=2).run()
    before = (tmp_path / "head" / "config.json").read_text()
    assert '"held out"' in before
    resumed(make(measured=2, steps=2)).run()
    assert (tmp_path / "head" / "config.json").read_text() == before


def test_training_ends_when_acceptance_does_not_rise(make: Make) -> None:
    stubborn = partial(make, measured=1, lr=1e-9, eval_every=2, patience=2)
    trainer = stubborn()
    trainer.run()
    assert (trainer.progress.step, trainer.progress.stale, trainer.finished) == (6, 2, True)
    again = resumed(stubborn())
    assert again.finished and again.progress == trainer.progress


def test_tensorboard_gets_every_metric(tmp_path: Path, make: Make) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    make(steps=3, tracker="tensorboard").run()
    written = events.EventAccumulator(str(tmp_path / "tracker"))
    written.Reload()
    found = set(written.Tags()["scalars"])
    assert found >= {"loss", "lr", "answer_tokens", "accuracy/0", "accuracy/3"}
    losses = [event.value for event in written.Scalars("loss")]
    assert losses == pytest.approx([m["loss"] for m in metrics_of(tmp_path)])


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("eagle3", "recompute", True),
        ("eagle3", "compile", True),
        ("p-eagle", "shard", True),
        ("p-eagle", "tracker", "paper"),
    ],
)
def test_settings_that_do_not_fit(make: Make, method: str, name: str, value: Any) -> None:
    with refused(name):
        make(method, **{name: value})


def test_a_step_without_trained_elements(tmp_path: Path, make: Make) -> None:
    """As of a document whose answer the head cannot draft: nothing is learnt, and all is logged."""
    nothing = [Example([1, 2, 3, 4], [False] * 4)]
    trainer = make(documents=nothing, steps=2, epochs=1)
    before = {name: t.clone() for name, t in trainer.drafter.state_dict().items()}
    trainer.run()
    assert [(m["loss"], m["accuracy"]) for m in metrics_of(tmp_path)] == [(0.0, [0.0] * 4)] * 2
    for name, tensor in trainer.drafter.state_dict().items():
        assert torch.equal(tensor, before[name])
