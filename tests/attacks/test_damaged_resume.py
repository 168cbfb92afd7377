"""Whatever happened to a run's files, resuming it works or is refused in one line that names the
file and the last good checkpoint; a refused attempt changes nothing on disk."""

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from damage import NEWEST, OLDER, OLDEST, PROGRESS, STATE, SUMS, Damage, garbled, tree, write
from tiny import own_answers

from peagle.data.example import Example
from peagle.errors import InputError
from peagle.model.target import Target
from peagle.train.config import TrainConfig
from peagle.train.resume import resume, start_from_here
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter

FUZZED = 2000 if os.environ.get("PEAGLE_ATTACKS") == "long" else 200
STEPS, SPEC = 6, HeadSpec(layers=1, depths=2, draft_vocab=100, feature_layers=(1, 2, 3))


@pytest.fixture(autouse=True)
def counted(count: Callable[..., None]) -> None:
    count("runs to resume, damaged in a way of its own")


@pytest.fixture(scope="module")
def data(target: Target) -> list[Example]:
    return own_answers(target, 8, 12)


@pytest.fixture(scope="module")
def made(
    target: Target, data: list[Example], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A run that was stopped, with three checkpoints."""
    folder: Path = tmp_path_factory.mktemp("made") / "run"
    trainer(folder, target, data).run()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        OLDEST, OLDER, NEWEST,
    ]  # fmt: skip
    before = tree(folder)
    yield folder
    assert tree(folder) == before, "tests work on copies"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def trainer(folder: Path, target: Target, data: list[Example], **changes: Any) -> Trainer:
    """A trainer, made as `peagle train` makes it."""
    torch.manual_seed(0)
    drafter = new_drafter(target, [e.ids for e in data], replace(SPEC, **changes))
    config = TrainConfig(folder, steps=STEPS, save_every=2, keep=3)
    return Trainer(config, target, drafter, data)


def refusal(run: Path, target: Target, data: list[Example], **changes: Any) -> str:
    """Resume and return the refusal; nothing on disk may have changed."""
    before, attempt = tree(run), trainer(run, target, data, **changes)
    with pytest.raises(InputError) as caught:
        resume(attempt)
    assert tree(run) == before
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800
    return str(caught.value)


def follow(line: str) -> None:
    """Delete what the error says."""
    folders = re.search("delete (.*) (to resume|and start)", line)
    assert folders, line
    for folder in folders[1].split(" and "):
        shutil.rmtree(folder)


CASES = [
    pytest.param(damage, f"{start}{expected}", id=f"{name}: {kind}")
    for name, start, cases in (
        ("progress.json", "progress.json: ", PROGRESS),
        ("state.safetensors", "state.safetensors: ", STATE),
        ("SHA256SUMS", "", SUMS),
    )
    for kind, (damage, expected) in cases.items()
]


@pytest.mark.parametrize(("damage", "expected"), CASES)
def test_newest_checkpoint(
    run: Path, target: Target, data: list[Example], damage: Damage, expected: str
) -> None:
    damage(run)
    line = refusal(run, target, data)
    newest = run / "checkpoints" / NEWEST
    assert line.startswith(f"{newest}/{expected}")
    assert line.endswith(f"; delete {newest} to resume from {OLDER}")
    follow(line)
    attempt = trainer(run, target, data)
    resume(attempt)
    assert attempt.progress.step == 4


def test_several_checkpoints(run: Path, target: Target, data: list[Example]) -> None:
    write("progress.json", "")(run)
    (run / "checkpoints" / OLDER / "state.safetensors").write_bytes(b"")
    line = refusal(run, target, data)
    damaged = [run / "checkpoints" / name for name in (NEWEST, OLDER)]
    assert line.endswith(f"; delete {damaged[0]} and {damaged[1]} to resume from {OLDEST}")
    follow(line)
    attempt = trainer(run, target, data)
    resume(attempt)
    assert attempt.progress.step == 2


def test_all_checkpoints(run: Path, target: Target, data: list[Example]) -> None:
    for name in (NEWEST, OLDER, OLDEST):
        (run / "checkpoints" / name / "progress.json").write_text("[]")
    line = refusal(run, target, data)
    folder = run / "checkpoints"
    fix = f"no other checkpoint is good: delete {folder} and start without `resume`"
    assert line.endswith(fix)
    follow(line)
    attempt = trainer(run, target, data)
    attempt.run()
    assert attempt.finished


def test_other_settings_are_no_damage(run: Path, target: Target, data: list[Example]) -> None:
    """No good checkpoint is to be deleted."""
    line = refusal(run, target, data, layers=2)
    assert "delete" not in line
    assert line.endswith("give the settings that the run was started with")


def test_foreign_files_are_left_alone(run: Path, target: Target, data: list[Example]) -> None:
    folder = run / "checkpoints"
    for name in ("step-", "step-9", "step-best", "step-00000099.bak", "old", ".making-abc"):
        (folder / name).mkdir()
    for name in ("step-00000098", "notes.txt", "step-x"):
        (folder / name).write_text("?")
    before = tree(run)
    attempt = trainer(run, target, data)
    resume(attempt)
    assert attempt.progress.step == 6 and tree(run) == before


@pytest.mark.parametrize("name", ["step-00000007", "step-100000000"])
def test_empty_folder(run: Path, target: Target, data: list[Example], name: str) -> None:
    """Steps are ordered as numbers; names have no more than eight digits for a long time."""
    (run / "checkpoints" / name).mkdir()
    line = refusal(run, target, data)
    assert f"{name}/progress.json: cannot be read" in line
    assert line.endswith(f"to resume from {NEWEST}")


@pytest.mark.parametrize("name", ["", NEWEST, f"{NEWEST}/progress.json"])
def test_forbidden(made: Path, target: Target, data: list[Example], name: str) -> None:
    """Files of another user. Root, which may read everything, becomes the user nobody here."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run = Path(shutil.copytree(made, Path(folder) / "run"))
        attempt = trainer(run, target, data)
        (run / "checkpoints" / name).chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises(InputError, match="cannot be read .*Permission denied"):
                resume(attempt)
        finally:
            os.seteuid(user)
            (run / "checkpoints" / name).chmod(0o755)


# ---- metrics.jsonl


METRICS = {
    "garbage": b"no JSON\n",
    "empty line": b"\n",
    "binary": b"\x00\xff\xfe\x80\n",
    "a list": b"[1]\n",
    "a number": b"3\n",
    "nested": b"[" * 100_000 + b"\n",
    "no step": b'{"loss": 1.0}\n',
    "step text": b'{"step": "3"}\n',
    "step bool": b'{"step": true}\n',
    "step null": b'{"step": null}\n',
    "step float": b'{"step": 3.5}\n',
    "cut in the middle": b'{"step": 3, "lo\n',
}


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("kind", METRICS)
def test_metrics(run: Path, target: Target, data: list[Example], kind: str, at: int) -> None:
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:at], METRICS[kind], *lines[at:]]))
    line = refusal(run, target, data)
    why = f"not a record of a step; remove line {at + 1}, or the whole file"
    assert line == f"{file}:{at + 1}: {why}"
    file.write_bytes(b"".join(lines))
    resume(trainer(run, target, data))


def test_metrics_without_a_checkpoint(run: Path, target: Target, data: list[Example]) -> None:
    """As a kill before the first one leaves them."""
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_bytes(b"no JSON\n")
    before = tree(run)
    with pytest.raises(InputError, match=r"metrics\.jsonl:1: not a record of a step"):
        start_from_here(trainer(run, target, data))
    assert tree(run) == before


@pytest.mark.parametrize("tail", [b'{"step": 7, "lo', bytes(30), b"\xff"])
def test_a_last_line_that_was_cut_is_forgotten(
    run: Path, target: Target, data: list[Example], tail: bytes
) -> None:
    file = run / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    attempt = trainer(run, target, data)
    resume(attempt)
    attempt.run()
    assert file.read_bytes() == whole


def test_metrics_that_are_a_folder(run: Path, target: Target, data: list[Example]) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: cannot be read" in refusal(run, target, data)


def test_random_damage(
    run: Path, made: Path, target: Target, data: list[Example], count: Callable[..., None]
) -> None:
    """Bytes changed, cut out, put in and cut off: refused in one line, or not noticed."""
    chance = random.Random(0)
    files = [f"checkpoints/{NEWEST}/{n}" for n in ("state.safetensors", "progress.json")]
    refused, attempt = 0, trainer(run, target, data)
    for _ in range(FUZZED):
        file = run / chance.choice([*files, "metrics.jsonl"])
        whole = file.read_bytes()
        file.write_bytes(garbled(whole, chance))
        try:
            resume(attempt)
        except InputError as error:
            refused += 1
            assert str(error).startswith(str(file)) and "\n" not in str(error)
        file.write_bytes(whole)
    assert tree(run) == tree(made) and refused > FUZZED // 3
    count("files of a run damaged at random", FUZZED)
