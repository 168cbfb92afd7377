"""Files and folders that cannot be written: one line with the path and the fix, code 2, no rest.

A file stands in the place of a folder, since tests may run as root, whom permissions do not stop.
"""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from json_files import write_lines
from runner import Words, invoke
from safetensors import SafetensorError

from peagle.cli import main

HUB = "huggingface_hub.constants.HF_HOME"
GGUF = "x.gguf"
MOVES = "set PEAGLE_HOME to a folder that can be written"


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for_safetensors(*_: object, **__: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error)")


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A folder that cannot be: a file is in its way."""
    (tmp_path / "file").write_text("kept")
    return tmp_path / "file" / "x"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "prompts.jsonl", {"turns": ["the cat"]}, {"turns": ["hat"]})


@pytest.mark.parametrize(
    "command",
    [
        ("export", "HEAD", "BLOCKED", "--to", "vllm"),
        ("train", "TARGET", "--data", "PROMPTS", "--output", "BLOCKED"),
        ("data", "capture", "TARGET", "--data", "PROMPTS", "--output", "BLOCKED"),
        ("data", "regenerate", "TARGET", "--prompts", "PROMPTS", "--output", "BLOCKED"),
        ("data", "synth", "TARGET", "--output", "BLOCKED"),
        ("bench", "TARGET", "--methods", "none", "--output", "BLOCKED"),
        ("demo", "--output", "BLOCKED"),
    ],
    ids=lambda command: command[0] if command[0] != "data" else command[1],
)
def test_output_that_cannot_be(
    refused, target: Path, heads: dict[str, Path], prompts: Path, blocked: Path, command
) -> None:
    named = {"TARGET": target, "HEAD": heads["eagle3"], "PROMPTS": prompts, "BLOCKED": blocked}
    line = refused(*(named.get(word, word) for word in command))
    assert str(blocked.parent) in line and "output " in line
    assert line.endswith(f": {os.strerror(errno.ENOTDIR)}; name another path") or (
        line.endswith(f": {os.strerror(errno.EEXIST)}; name another path")
    )
    assert blocked.parent.read_text() == "kept"


@pytest.mark.parametrize("command", [("demo",), ("bench", "nowhere", "--methods", "none")])
def test_a_folder_in_place_of_the_results(refused, tmp_path: Path, command: Words) -> None:
    """Before anything is loaded and measured."""
    line = refused(*command, "--output", tmp_path, field="output")
    assert line.endswith("is a folder; name a file")


def test_a_folder_of_another_user(
    refused, training: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "runs"))
    monkeypatch.setattr("peagle.cli.common.tempfile.TemporaryFile", Mock(side_effect=denied))
    line = refused(*training, "--output", "runs/mine", field="output")
    assert line == "peagle: --output runs/mine: Permission denied; name another path"


@pytest.mark.parametrize(
    "command",
    [
        ("generate", GGUF, "x"),
        ("chat", GGUF),
        ("serve", GGUF, "--port", 0),
        ("eval", GGUF, "--dataset", "PROMPTS"),
        ("bench", GGUF, "--methods", "none", "--dataset", "PROMPTS"),
        ("train", GGUF, "--data", "PROMPTS", "--output", "out"),
        ("data", "show", "PROMPTS", "--target", GGUF),
        ("data", "regenerate", GGUF, "--prompts", "PROMPTS", "--output", "out.jsonl"),
        ("doctor", "HEAD", GGUF),
        ("export", "HEAD", "out", "--to", "vllm", "--target", GGUF),
    ],
    ids=lambda command: command[0] if command[0] != "data" else command[1],
)
def test_a_cache_that_cannot_be(  # noqa: PLR0913, PLR0917 (fixtures)
    refused,
    heads: dict[str, Path],
    prompts: Path,
    blocked: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command,
) -> None:
    """A home that cannot be written, as containers have it: the line names what moves the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PEAGLE_HOME", str(blocked))
    Path(GGUF).write_bytes(b"GGUF")
    before = sorted(tmp_path.iterdir())
    named = {"PROMPTS": prompts, "HEAD": heads["eagle3"]}
    line = refused(*(named.get(word, word) for word in command))
    assert f"{blocked}/targets: {os.strerror(errno.ENOTDIR)}; {MOVES}" in line
    assert sorted(tmp_path.iterdir()) == before


def test_without_a_home_the_cache_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Mock(side_effect=RuntimeError("Could not determine home directory."))
    monkeypatch.delenv("PEAGLE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", none)
    assert main.in_a_line(PermissionError(errno.EACCES, "No", "/.cache/peagle/x")).endswith(MOVES)


@pytest.mark.parametrize(
    ("place", "failure", "why"),
    [
        ("peagle.heads.save.os.replace", full, "No space left on device"),
        ("peagle.files.os.replace", full, "No space left on device"),
        ("peagle.heads.save.save_torch_state_dict", full_for_safetensors, "Error while"),
    ],
)
def test_a_disk_that_gets_full_while_a_head_is_exported(  # noqa: PLR0913, PLR0917 (fixtures)
    refused, heads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failure, why: str
) -> None:
    monkeypatch.setattr(place, failure)
    out = tmp_path / "out"
    line = refused("export", heads["p-eagle"], out, "--to", "vllm")
    assert f"output {out}: {why}" in line and "make room, or name another path" in line
    assert [file.name for file in tmp_path.rglob(".*")] == []


def test_a_disk_that_gets_full_while_answers_are_written(
    refused, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line that was written is taken back; the next run goes on."""
    made = tmp_path / "made.jsonl"
    command = ("data", "regenerate", target, "--prompts", prompts, "--output", made)
    invoke(*command, "--limit", 1, "--max-tokens", 4)
    before, write = made.read_text(), os.write

    def some(file: int, content: memoryview) -> int:
        return write(file, content[:9]) if len(content) > 20 else full() or 0

    with monkeypatch.context() as patch:
        patch.setattr("peagle.data.records.os.write", some)
        line = refused(*command, "--max-tokens", 4)
    assert f"output {made}: No space left on device; make room" in line
    assert made.read_text() == before
    invoke(*command, "--max-tokens", 4)
    assert made.read_text().startswith(before) and len(made.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("place", "failure"),
    [
        ("peagle.train.state.save_file", full_for_safetensors),
        ("peagle.train.state.os.replace", full),
        ("peagle.train.state.append_line", full),
    ],
)
def test_a_disk_that_gets_full_while_a_head_is_trained(  # noqa: PLR0913, PLR0917 (fixtures)
    refused, training: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failure
) -> None:
    small = ("--layers", 1, "--depths", 2, "--draft-vocab", 100, "--save-every", 1)
    monkeypatch.setattr(place, failure)
    monkeypatch.setattr("peagle.cli.common.screen.print", lambda *_, **__: None)
    line = refused(*training, "--output", tmp_path / "out", *small, field="output")
    assert "make room" in line and "--resume" in line
    assert not list(tmp_path.rglob(".making-*"))


def test_a_disk_that_gets_full_while_it_is_measured(
    refused, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = write_lines(tmp_path / "q.jsonl", {"turns": ["the cat"]})
    output = tmp_path / "new" / "bench.json"
    monkeypatch.setattr("peagle.files.os.replace", full)
    how = ("--methods", "none", "--dataset", questions, "--max-tokens", 2, "--repeats", 1)
    assert "make room" in refused("bench", target, *how, "--output", output, field="output")
    assert list(output.parent.iterdir()) == []


def test_a_library_of_heads_that_cannot_be_written(
    refused, monkeypatch: pytest.MonkeyPatch, blocked: Path
) -> None:
    """The hub's library raises an error of another type, with the path in its text."""
    said = f"PermissionError at {blocked}/hub/x when downloading a/b. Check it."
    fails = Mock(side_effect=OSError(said))
    monkeypatch.setattr(HUB, str(blocked))
    monkeypatch.setattr("peagle.model.loader.reached", lambda: True)
    monkeypatch.setattr("peagle.model.loader.snapshot_download", fails)
    line = refused("generate", "owner/name", "x")
    assert line.endswith("Check it; set HF_HOME to a folder that can be written")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied; name another"),
        (OSError(30, "Read-only file system", "/x"), "/x: Read-only file system; name another"),
        (OSError(36, "File name too long", "y" * 9), "yyyyyyyyy: File name too long; name ano"),
        (OSError(28, "No space left on device"), "No space left on device; make room, or"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), "set TMPDIR to"),
    ],
)
def test_any_command(refused, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str) -> None:
    """Wherever a file is refused: the entry point tells of it in one line."""
    monkeypatch.setattr("peagle.cli.models.load_catalog", Mock(side_effect=error))
    assert said in refused("catalog")


def test_an_error_of_another_file_keeps_its_name(refused, heads, tmp_path, monkeypatch) -> None:
    elsewhere = PermissionError(13, "Permission denied", "/elsewhere/file")
    monkeypatch.setattr("peagle.tools.card.write_card", Mock(side_effect=elsewhere))
    line = refused("export", heads["p-eagle"], tmp_path / "out", "--to", "vllm")
    assert line == "peagle: /elsewhere/file: Permission denied; name another path"
