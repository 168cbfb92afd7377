"""The `peagle` command itself: its entry point, and what it does before any command runs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from json_files import write_lines
from runner import PEAGLE, invoke
from typer.core import TyperCommand, TyperGroup

from peagle import __version__
from peagle.cli.main import COMMANDS, first_screen, load_command, main


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("command", [[PEAGLE], [sys.executable, "-m", "peagle"]])
def test_entry_points_print_the_version(command: list[object]) -> None:
    done = run(*command, "--version")
    assert (done.returncode, done.stdout) == (0, f"peagle {__version__}\n")


def test_the_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PEAGLE_COMPLETE", "complete_bash")
    for words, found in (("peagle ge", "generate"), ("peagle doctor --devi", "--device")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert run(PEAGLE).stdout.split() == [found]


def test_bad_input_is_one_line_and_code_2(refused) -> None:
    line = refused("train", "some-target", "--output", "somewhere", field="data")
    assert line == "peagle: --data: is missing; name a JSONL file of answers"


def test_alone_it_shows_what_most_people_need_first() -> None:
    done = run(PEAGLE)
    assert (done.returncode, done.stdout, done.stderr) == (0, first_screen(), "")
    calls = [line.split() for line in done.stdout.splitlines() if line.startswith("  peagle ")]
    assert len(calls) == 5 and {call[1] for call in calls} <= COMMANDS.keys()
    assert "peagle --help" in done.stdout


def test_every_command_has_a_panel_and_a_line() -> None:
    shown = invoke("--help").stdout
    for name, (_, panel, text) in COMMANDS.items():
        assert f"─ {panel} ─" in shown
        assert any(name in line and text[:30] in line for line in shown.splitlines()), name


def test_an_unknown_command(refused) -> None:
    assert "did you mean serve?" in refused("serv", "a", field="command")
    assert "peagle --help" in refused("xyzzy", field="command")


def test_values_are_no_commands(refused) -> None:
    """Whatever they are called."""
    where = ("--to", "kubernetes", "--dry-run", "--namespace", "logs", "--as", "compose")
    refused("deploy", "gpt-oss-20b", *where, field="form")


TEXT = b"a caf\xe9"  # Latin-1


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (("generate", "nowhere", TEXT), "prompt"),
        (("generate", TEXT, "hi"), "target"),
        (("generate", "nowhere", "hi", "--stop", "b", "--stop", TEXT), "stop"),
        (("generate", "nowhere", "hi", "--regex", TEXT), "regex"),
        (("data", "synth", "nowhere", "--output", "out.jsonl", "--system", TEXT), "system"),
    ],
)
def test_an_argument_that_is_no_text(refused, command: tuple[str | bytes, ...], field: str) -> None:
    line = refused(*map(os.fsdecode, command), field=field)
    assert line.endswith(": is not UTF-8 text")


def test_a_path_may_be_no_text() -> None:
    """Files may have any name."""
    command: list[str | bytes | Path] = [PEAGLE, "data", "show", TEXT, "--target", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "peagle: file a caf\\udce9: no such file\n"


def test_characters_that_a_terminal_lacks(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "sat"}]
    file = write_lines(tmp_path / "data.jsonl", {"messages": talk})
    terminal = BytesIO()
    command = ["data", "show", str(file), "--target", str(target), "--record", "1"]
    monkeypatch.setattr("sys.argv", ["peagle", *command])
    monkeypatch.setattr("sys.stdout", TextIOWrapper(terminal, "latin-1"))
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout.flush()
    assert ended.value.code == 0 and b"\n?sat<|im_end|>?\n" in terminal.getvalue()


def each(name: str, command: TyperCommand | TyperGroup) -> Iterator[tuple[str, TyperCommand]]:
    """A command and those below it."""
    yield name, command
    if isinstance(command, TyperGroup):
        for part, below in command.commands.items():
            yield from each(f"{name} {part}", below)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    for path, command in each(name, load_command(name)):
        assert f"Usage: root {path} [OPTIONS]" in invoke(*path.split(), "--help").stdout
        for parameter in command.params:
            assert parameter.help, f"peagle {path}: {parameter.name}"
            named = set(re.findall(r"--(\w+)", parameter.help))
            assert not named & COMMANDS.keys(), "a command is no option"
