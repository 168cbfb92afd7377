"""`peagle train` with damaged files of all kinds, as a user sees it: one line on stderr that names
the file, exit code 2, and nothing changed on disk."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import NEWEST, Damage, garbled, only, progress, tensors, tree
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import make_target, own_answers, save_target

from peagle.cli.main import main

FUZZED = 12
SMALL = ("--layers", "1", "--depths", "2", "--draft-vocab", "100")

Peagle = Callable[..., str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, answers, what was captured of them, and a run of each."""
    folder: Path = tmp_path_factory.mktemp("made")
    target = make_target(layers=7)
    save_target(target, folder / "target")
    records = [{"prompt_ids": e.ids[:1], "answer_ids": e.ids[1:]} for e in own_answers(target, 12)]
    answers = folder / "answers.jsonl"
    answers.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.MonkeyPatch.context() as patch:
        data = ("--data", answers, "--output", folder / "captured")
        assert run(patch, "data", "capture", folder / "target", *data) == 0
        for output, source in (("run", "answers.jsonl"), ("captured run", "captured")):
            assert run(patch, *command(folder, source, output), "--steps", 6) == 0
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: Callable[..., None]
) -> Peagle:
    """Runs a command that must end with code 2; returns its last line on stderr, where training may
    have begun before."""

    def refuse(folder: Path, *args: object) -> str:
        before = tree(folder)
        capsys.readouterr()
        assert run(monkeypatch, *args) == 2
        out, errors = capsys.readouterr()
        *begun, line = errors.splitlines()
        assert line.startswith("peagle: ") and out == ""
        assert [text.partition(" on ")[0] for text in begun] in ([], ["training"])
        assert tree(folder) == before
        count("damaged files given to `peagle train`")
        return line.removeprefix("peagle: ")

    return refuse


def run(patch: pytest.MonkeyPatch, *args: object) -> object:
    """`peagle …` in this process; returns its exit code."""
    patch.setattr("sys.argv", ["peagle", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def command(folder: Path, data: str = "answers.jsonl", output: str = "run") -> list[object]:
    files = ("--data", folder / data, "--output", folder / output)
    return ["train", folder / "target", *files, *SMALL, "save_every=2", "keep=3"]


RUN: dict[str, tuple[Damage, str]] = {
    "progress.json": (progress(step="six"), f"checkpoints/{NEWEST}/progress.json: damaged"),
    "moments": (tensors(only("weights/")), f"checkpoints/{NEWEST}/state.safetensors: damaged"),
    "metrics.jsonl": (
        lambda run: (run / "metrics.jsonl").write_text("?\n") and None,
        "metrics.jsonl:1: not a record of a step",
    ),
}


@pytest.mark.parametrize(("damage", "beginning"), RUN.values(), ids=RUN)
def test_run(copy: Path, refused: Peagle, damage: Damage, beginning: str) -> None:
    damage(copy / "run")
    line = refused(copy, *command(copy), "--steps", 8, "--resume")
    assert line.startswith(f"{copy / 'run'}/{beginning}")


@pytest.mark.parametrize("content", [b"\xff\xfe\x80", b"[" * 50_000, b"\x00\x00", b"[1]", b"lr: {"])
def test_settings(copy: Path, refused: Peagle, content: bytes) -> None:
    (copy / "c.yaml").write_bytes(content)
    line = refused(copy, *command(copy), "--resume", "--config", copy / "c.yaml")
    assert line.startswith(f"--config {copy / 'c.yaml'}: ")


@pytest.mark.parametrize("value", ["[[", "[" * 5000, "\x00", "'"])
def test_override(copy: Path, refused: Peagle, value: str) -> None:
    line = refused(copy, *command(copy), "--resume", f"lr={value}")
    assert line.startswith("--lr ") and len(line) < 200


@pytest.mark.parametrize("content", [b"\xff\xfe\x80\n", b"[" * 100_000 + b"\n", b"[1]\n", bytes(9)])
def test_data(copy: Path, refused: Peagle, content: bytes) -> None:
    with (copy / "answers.jsonl").open("ab") as file:
        file.write(content)
    line = refused(copy, *command(copy), "--resume")
    assert line.startswith(f"{copy / 'answers.jsonl'}:13: ")


@pytest.mark.parametrize("below", ["", "/run"])
def test_output_that_is_a_file(copy: Path, refused: Peagle, below: str) -> None:
    line = refused(copy, *command(copy, output=f"answers.jsonl{below}"))
    where = copy / f"answers.jsonl{below}"
    assert line == f"--output {where}: Not a directory; name another path"


@pytest.mark.parametrize("name", ["ids", "lengths", "supervised", "hidden"])
def test_shard_of_a_capture(copy: Path, refused: Peagle, name: str) -> None:
    """Its documents are checked before training, what the target made of them when it is used."""
    file = copy / "captured" / "shard-00000.safetensors"
    with safe_open(file, framework="pt") as stored:
        header = stored.metadata()
    tensors_of_shard = load_file(file)
    tensors_of_shard[name] = tensors_of_shard[name] * 0
    save_file(tensors_of_shard, file, header)
    line = refused(copy, *command(copy, "captured", "captured run"), "--steps", 8, "--resume")
    assert line.startswith(f"{file}: is damaged")


def test_random_damage_to_a_shard(copy: Path, refused: Peagle) -> None:
    file, chance = copy / "captured" / "shard-00000.safetensors", random.Random(0)
    whole = file.read_bytes()
    for _ in range(FUZZED):
        file.write_bytes(garbled(whole, chance))
        line = refused(copy, *command(copy, "captured", "captured run"), "--steps", 8, "--resume")
        assert line.startswith(f"{file}: ")
