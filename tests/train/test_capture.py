"""A capture is exact, resumes, fits the disk, and trains as the target itself does."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from refusals import refused
from safetensors import SafetensorError
from tiny import make_target, make_tokenizer, own_answers

from peagle.data.captured import Captures
from peagle.data.example import Example
from peagle.model.target import Target, TargetOutput
from peagle.train import capture as capture_module
from peagle.train.batches import Batches
from peagle.train.capture import (
    MAX_HEADER,
    CaptureConfig,
    Plan,
    capture,
    in_process,
    plan_capture,
)
from peagle.train.config import TrainConfig
from peagle.train.passes import run_target
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.walk import Walk, acceptance
from peagle.train.warm_start import new_drafter

LAYERS = (1, 2, 3)
SHARD = 25_000  # bytes: four or five documents


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def half(target: Target) -> Target:
    """The same target in bf16."""
    other = make_target()
    return Target(other.model.to(torch.bfloat16), make_tokenizer(), "tiny-bf16")


@pytest.fixture(scope="module")
def data(target: Target) -> list[Example]:
    return own_answers(target, 24)


def settings(folder: Path, **changes: Any) -> CaptureConfig:
    return CaptureConfig(folder, **{"feature_layers": LAYERS, "shard_bytes": SHARD} | changes)


def captured(target: Target, data: list[Example], folder: Path, **changes: Any) -> Captures:
    plan = plan_capture(target, data, settings(folder, **changes))
    capture(in_process(target, LAYERS), data, folder, plan)
    return Captures([folder])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_hold_all_documents_in_order(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    assert list(captured(target, data, tmp_path)) == data
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) > 3
    assert max(sizes) <= SHARD + MAX_HEADER


def test_a_document_larger_than_a_shard_is_one(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    captured(target, data[:3], tmp_path, shard_bytes=1)
    assert len(contents(tmp_path)) == 3


class Killed(Exception):
    pass


@pytest.mark.parametrize("whole", range(5))
def test_a_stopped_capture_goes_on(
    tmp_path: Path,
    target: Target,
    data: list[Example],
    monkeypatch: pytest.MonkeyPatch,
    whole: int,  # shards
) -> None:
    captured(target, data, tmp_path / "straight")
    write, written = capture_module.write_shard, list[str]()

    def failing(path: Path, *rest: Any) -> None:
        if len(written) == whole:
            raise Killed
        written.append(path.name)
        write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(capture_module, "write_shard", failing)
        with pytest.raises(Killed):
            captured(target, data, tmp_path / "halves")
    with refused("data"):
        Captures([tmp_path / "halves"])
    plan = plan_capture(target, data, settings(tmp_path / "halves"))
    assert plan.done == set(range(whole))
    (tmp_path / "halves" / f".shard-{whole:05d}.safetensors").write_bytes(b"half")
    captured(target, data, tmp_path / "halves")
    assert contents(tmp_path / "halves") == contents(tmp_path / "straight")


@pytest.mark.slow
def test_a_killed_capture_goes_on(tmp_path: Path, target: Target, data: list[Example]) -> None:
    captured(target, data, tmp_path / "straight")
    script = Path(__file__).with_name("run_capture.py")
    command = [sys.executable, str(script), str(tmp_path / "halves"), str(SHARD), "13"]
    done = subprocess.run(command, check=False)
    assert done.returncode == -signal.SIGKILL
    plan = plan_capture(target, data, settings(tmp_path / "halves"))
    assert 0 < len(plan.done) < len(plan.shards)
    captured(target, data, tmp_path / "halves")
    assert contents(tmp_path / "halves") == contents(tmp_path / "straight")


def test_only_a_shard_that_is_gone_is_made_anew(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    captured(target, data, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    ran = list[None]()
    plan = plan_capture(target, data, settings(tmp_path))
    capture(in_process(target, LAYERS), data, tmp_path, plan, lambda: ran.append(None))
    assert len(ran) == len(plan.shards[1])
    assert contents(tmp_path) == before


def test_a_full_disk_leaves_whole_shards(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peagle.data import shard as shard_module  # noqa: PLC0415

    save, calls = shard_module.save_file, list[None]()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise SafetensorError("No space left on device (os error 28)")
        save(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            captured(target, data, tmp_path)
    assert sorted(contents(tmp_path)) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert list(captured(target, data, tmp_path)) == data


class Usage(NamedTuple):
    """A part of `shutil.disk_usage`."""

    free: int


def test_the_estimate_is_the_size_of_the_files_and_is_required(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "not" / "there"

    def planned(free: int, config: CaptureConfig) -> Plan:
        monkeypatch.setattr(capture_module.shutil, "disk_usage", lambda path: Usage(free))
        return plan_capture(target, data, config)

    config = settings(folder)
    plan = planned(1 << 40, config)
    assert plan.tokens == sum(len(e.ids) for e in data)
    with refused("output"):
        planned(plan.bytes - 1, config)
    assert not folder.exists()
    capture(in_process(target, LAYERS), data, folder, planned(plan.bytes, config))
    taken = sum(map(len, contents(folder).values()))
    assert taken <= plan.bytes <= taken + MAX_HEADER * len(plan.shards)
    assert planned(0, config).bytes_left == 0, "nothing left to write"


def captured_part(
    target: Target, data: list[Example], folder: Path, part: tuple[int, int], **changes: Any
) -> Plan:
    plan = plan_capture(target, data, settings(folder, part=part, **changes))
    capture(in_process(target, LAYERS), data, folder, plan)
    return plan


def test_parts_make_the_files_of_the_whole(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    captured(target, data, tmp_path / "whole")
    plans = [captured_part(target, data, tmp_path / "one", (i, 4)) for i in (3, 1, 4, 2)]
    assert contents(tmp_path / "one") == contents(tmp_path / "whole")
    assert sum(plan.documents for plan in plans) == len(data)
    assert max(plan.bytes for plan in plans) < 0.5 * sum(plan.bytes for plan in plans)
    folders = [tmp_path / f"folder{i}" for i in (1, 2, 3)]
    for i, folder in enumerate(folders, start=1):
        captured_part(target, data, folder, (i, 3))
    assert list(Captures(folders[::-1])) == data
    with refused("data") as error:
        Captures(folders[1:])
    assert "documents 1 to " in error.value.why
    captured_part(target, data, tmp_path / "other_n", (1, 2))
    with refused() as error:
        Captures([*folders, tmp_path / "other_n"])
    assert "both have the same documents" in error.value.why
    captured_part(target, data[1:], tmp_path / "other_data", (3, 3))
    with refused() as error:
        Captures([*folders[:2], tmp_path / "other_data"])
    assert "captured from other documents" in error.value.why
    captured_part(make_target(seed=7), data, tmp_path / "other_target", (3, 3))
    with refused() as error:
        Captures([*folders[:2], tmp_path / "other_target"])
    assert "captured from a target with other weights" in error.value.why


@pytest.mark.parametrize("part", [(0, 2), (3, 2), (1, 0)])
def test_parts_that_cannot_be(tmp_path: Path, part: tuple[int, int]) -> None:
    with refused("part"):
        settings(tmp_path, part=part)


@pytest.mark.parametrize("changes", [{"feature_layers": (0, 2)}, {"shard_bytes": 9}])
def test_a_folder_of_another_capture_is_refused(
    tmp_path: Path, target: Target, data: list[Example], changes: dict[str, Any]
) -> None:
    captured(target, data, tmp_path)
    with refused("output"):
        plan_capture(target, data, settings(tmp_path, **changes))
    with refused("output") as error:
        plan_capture(target, data[:-1], settings(tmp_path))
    assert "other documents" in error.value.why


@pytest.mark.parametrize("layers", [None, (2, 1), (1, 1)])
def test_feature_layers_that_cannot_be(
    tmp_path: Path, target: Target, data: list[Example], layers: tuple[int, ...] | None
) -> None:
    with refused("feature_layers"):
        plan_capture(target, data, settings(tmp_path, feature_layers=layers))


def test_packed_documents_are_those_of_the_sequence(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    captured(target, data[:5], tmp_path / "a")
    captured(target, data[5:], tmp_path / "b")
    whole = Captures([tmp_path / "a", tmp_path / "b"])
    assert list(whole) == data
    kept = [number for number in range(len(data)) if number % 4]
    read = whole.only(kept)
    batches = Batches([data[number] for number in kept], batch=1, pack=90, seed=3)
    packed = 0
    for number in range(12):
        sequence = batches.sequence(number)
        documents = sequence.numbers
        packed += len(documents) > 1
        wanted, found = run_target(target, sequence, LAYERS), read.output(documents, target)
        torch.testing.assert_close(found.hidden, wanted.hidden, rtol=1 / 256, atol=1e-5)
        torch.testing.assert_close(found.features, wanted.features, rtol=1 / 256, atol=1e-5)
    assert packed > 6


def losses(
    folder: Path, target: Target, data: list[Example], source: Captures | None, **more: Any
) -> tuple[list[float], Trainer]:
    """Six steps; the acceptance length is measured on two of the documents."""
    torch.manual_seed(0)
    spec = HeadSpec("p-eagle", layers=2, depths=4, draft_vocab=100, feature_layers=LAYERS)
    drafter = new_drafter(target, [e.ids for e in data], spec)
    measure, found = partial(acceptance, Walk(target, data[:2])), list[float]()
    config = TrainConfig(folder, **({"steps": 6, "lr": 3e-3, "eval_every": 3} | more))
    trainer = Trainer(config, target, drafter, data, measure, source and source.output)
    trainer.run(lambda metrics: found.append(metrics["loss"]))
    return found, trainer


class Wrong(Captures):
    """Gives features or hidden states to the token behind theirs."""

    moved = "features"

    def output(self, documents: Any, target: Target) -> TargetOutput:
        output = super().output(documents, target)
        return output._replace(**{self.moved: getattr(output, self.moved).roll(1, 0)})


def test_training_from_a_capture_is_training_online(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    near = 0.003
    read, wrong = captured(target, data, tmp_path / "cap"), Wrong([tmp_path / "cap"])
    more = {"batch": 2, "pack": 90, "segments": 2}
    online, _ = losses(tmp_path / "online", target, data, None, **more)
    stored, _ = losses(tmp_path / "stored", target, data, read, **more)
    assert stored == pytest.approx(online, rel=near)
    for wrong.moved in ("features", "hidden"):
        others, _ = losses(tmp_path / wrong.moved, target, data, wrong, **more)
        assert others != pytest.approx(online, rel=near), wrong.moved


def test_training_from_a_capture_of_a_bf16_target_is_exact(
    tmp_path: Path, half: Target, data: list[Example]
) -> None:
    read = captured(half, data, tmp_path / "cap")
    online, first = losses(tmp_path / "online", half, data, None, batch=2)
    stored, second = losses(tmp_path / "stored", half, data, read, batch=2)
    assert stored == online
    for name, tensor in first.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name


def test_the_target_is_not_run_over_captured_documents(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = captured(target, data, tmp_path / "cap")
    monkeypatch.setattr("peagle.train.trainer.run_target", None)
    losses(tmp_path / "run", target, data, read, steps=2)


def test_another_target_template_or_layers_are_refused(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    read = captured(target, data[:4], tmp_path)
    read.check(target, LAYERS)
    other_template = make_target()
    assert other_template.tokenizer is not None
    other_template.tokenizer.chat_template = "{{ messages }}"
    others = {
        "weights": make_target(seed=7),
        "architecture": make_target(layers=5),
        "chat template": other_template,
    }
    for name, other in others.items():
        with refused("data") as error:
            read.check(other)
        assert name in error.value.why
    with refused("data") as error:
        read.check(target, (0, 1, 3))
    assert "feature layers" in error.value.why
