"""A capture is exact, resumes, fits the disk, and trains as the target itself does."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors import SafetensorError
from tiny import make_target, make_tokenizer, own_answers

from peagle.data import captured as captured_module
from peagle.data.captured import Captures
from peagle.data.example import Example
from peagle.model.target import Target, TargetOutput
from peagle.train import capture as capture_module
from peagle.train.batches import Batches
from peagle.train.capture import MAX_HEADER, CaptureConfig, Plan, capture, in_process, plan_capture
from peagle.train.config import TrainConfig
from peagle.train.passes import run_target
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.walk import Walk, acceptance
from peagle.train.warm_start import new_drafter

LAYERS = (1, 2, 3)
SHARD = 25_000  # bytes: four or five documents


@pytest.fixture(scope="module")
def half(target: Target) -> Target:
    """The same target in bf16."""
    other = make_target()
    return Target(other.model.to(torch.bfloat16), make_tokenizer(), "tiny-bf16")


@pytest.fixture(scope="module")
def data(target: Target) -> list[Example]:
    return own_answers(target, 24)


@dataclass
class Capturing:
    """Captures of documents into folders that are named here."""

    folder: Path
    target: Target
    data: list[Example]

    def plan(self, name: str, **changes: Any) -> Plan:
        given = {"feature_layers": LAYERS, "shard_bytes": SHARD} | changes
        return plan_capture(self.target, self.data, CaptureConfig(self.folder / name, **given))

    def run(self, name: str, **changes: Any) -> Plan:
        plan = self.plan(name, **changes)
        capture(in_process(self.target, LAYERS), self.data, self.folder / name, plan)
        return plan

    def made(self, name: str, **changes: Any) -> Captures:
        self.run(name, **changes)
        return Captures([self.folder / name])

    def contents(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / name).iterdir()}


@pytest.fixture
def own(tmp_path: Path, target: Target, data: list[Example]) -> Capturing:
    """Captures of the target's own answers."""
    return Capturing(tmp_path, target, data)


def test_shards_hold_all_documents_in_order(own: Capturing) -> None:
    assert list(own.made("a")) == own.data
    sizes = [len(content) for content in own.contents("a").values()]
    assert len(sizes) > 3 and max(sizes) <= SHARD + MAX_HEADER


def test_a_document_larger_than_a_shard_is_one(own: Capturing) -> None:
    own.run("a", shard_bytes=1)
    assert len(own.contents("a")) == len(own.data)


class Killed(Exception):
    pass


@pytest.mark.parametrize("whole", range(5))  # shards
def test_a_stopped_one_goes_on(own: Capturing, monkeypatch: pytest.MonkeyPatch, whole: int) -> None:
    own.run("straight")
    write, written = capture_module.write_shard, list[str]()

    def failing(path: Path, *rest: Any) -> None:
        if len(written) == whole:
            raise Killed
        written.append(path.name)
        write(path, *rest)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(capture_module, "write_shard", failing)
        own.run("halves")
    with refused("data"):
        Captures([own.folder / "halves"])
    assert own.plan("halves").done == set(range(whole))
    (own.folder / "halves" / f".shard-{whole:05d}.safetensors").write_bytes(b"half")
    own.run("halves")
    assert own.contents("halves") == own.contents("straight")


def test_only_a_shard_that_is_gone_is_made_anew(own: Capturing) -> None:
    own.run("a")
    before = own.contents("a")
    (own.folder / "a" / "shard-00001.safetensors").unlink()
    ran, plan = list[None](), own.plan("a")
    run_target = in_process(own.target, LAYERS)
    capture(run_target, own.data, own.folder / "a", plan, lambda: ran.append(None))
    assert len(ran) == len(plan.shards[1])
    assert own.contents("a") == before


def test_a_full_disk_leaves_whole_shards(own: Capturing, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = captured_module.save_file, list[None]()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise SafetensorError("No space left on device (os error 28)")
        save(tensors, path, metadata)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(captured_module, "save_file", full)
        own.run("a")
    assert sorted(own.contents("a")) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert list(own.made("a")) == own.data


def test_the_estimate_is_the_size_of_the_files_and_is_required(
    own: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def have(free: int) -> None:
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(capture_module.shutil, "disk_usage", lambda path: usage)

    have(1 << 40)
    plan = own.plan("not/there")
    assert plan.tokens == sum(len(e.ids) for e in own.data)
    have(plan.bytes - 1)
    with refused("output"):
        own.plan("not/there")
    assert not (own.folder / "not").exists()
    have(plan.bytes)
    own.run("not/there")
    taken = sum(map(len, own.contents("not/there").values()))
    assert taken <= plan.bytes <= taken + MAX_HEADER * len(plan.shards)
    have(0)
    assert own.plan("not/there").bytes_left == 0, "nothing left to write"


def test_parts_make_the_files_of_the_whole(own: Capturing) -> None:
    own.run("whole")
    plans = [own.run("one", part=(i, 4)) for i in (3, 1, 4, 2)]
    assert own.contents("one") == own.contents("whole")
    assert sum(plan.documents for plan in plans) == len(own.data)
    assert max(plan.bytes for plan in plans) < 0.5 * sum(plan.bytes for plan in plans)


def test_parts_in_folders_of_their_own(own: Capturing) -> None:
    for i in (1, 2, 3):
        own.run(f"{i}", part=(i, 3))
    folders = [own.folder / name for name in "123"]
    assert list(Captures(folders[::-1])) == own.data
    with refused("data") as error:
        Captures(folders[1:])
    assert "documents 1 to " in error.value.why
    own.run("other", part=(1, 2))
    with refused() as error:
        Captures([*folders, own.folder / "other"])
    assert "both have the same documents" in error.value.why


@pytest.mark.parametrize(
    ("seed", "first", "why"),
    [(0, 1, "captured from other documents"), (7, 0, "captured from a target with other weights")],
)
def test_parts_of_other_captures(own: Capturing, seed: int, first: int, why: str) -> None:
    other = Capturing(own.folder, make_target(seed=seed), own.data[first:])
    for i, capturing in enumerate((own, own, other), start=1):
        capturing.run(f"{i}", part=(i, 3))
    with refused() as error:
        Captures([own.folder / name for name in "123"])
    assert why in error.value.why


@pytest.mark.parametrize(
    ("field", "values"),
    [("part", [(0, 2), (3, 2), (1, 0)]), ("feature_layers", [None, (2, 1), (1, 1)])],
)
def test_settings_that_cannot_be(own: Capturing, field: str, values: list[Any]) -> None:
    for value in values:
        with refused(field):
            own.plan("a", **{field: value})


@pytest.mark.parametrize("changes", [{"feature_layers": (0, 2)}, {"shard_bytes": 9}])
def test_a_folder_of_another_capture_is_refused(own: Capturing, changes: dict[str, Any]) -> None:
    own.run("a")
    with refused("output"):
        own.plan("a", **changes)
    with refused("output") as error:
        Capturing(own.folder, own.target, own.data[:-1]).plan("a")
    assert "other documents" in error.value.why


def test_packed_documents_are_the_same(tmp_path: Path, target: Target, data: list[Example]) -> None:
    Capturing(tmp_path, target, data[:5]).run("a")
    Capturing(tmp_path, target, data[5:]).run("b")
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


def test_training_is_as_online(own: Capturing, target: Target, data: list[Example]) -> None:
    near, tmp_path = 0.003, own.folder
    read, wrong = own.made("cap"), Wrong([tmp_path / "cap"])
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
    read = Capturing(tmp_path, half, data).made("cap")
    online, first = losses(tmp_path / "online", half, data, None, batch=2)
    stored, second = losses(tmp_path / "stored", half, data, read, batch=2)
    assert stored == online
    for name, tensor in first.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name


def test_another_target_template_or_layers_are_refused(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    read = Capturing(tmp_path, target, data[:4]).made("cap")
    read.check(target, LAYERS)
    other_template = make_target()
    other_template.tokenizer.chat_template = "{{ messages }}"
    others = {"weights": make_target(seed=7), "architecture": make_target(layers=5)}
    for name, other in (others | {"chat template": other_template}).items():
        with refused("data") as error:
            read.check(other)
        assert name in error.value.why
    with refused("data") as error:
        read.check(target, (0, 1, 3))
    assert "feature layers" in error.value.why
