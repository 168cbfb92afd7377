"""The `peagle` command itself: its entry point, and what it does before any command runs."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from runner import PEAGLE, invoke
from typer.core import TyperCommand, TyperGroup

from peagle import __version__
from peagle.cli.main import COMMANDS, first_screen, load_command


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


@pytest.mark.parametrize(
    ("line", "name", "now"),
    [
        ("push head owner/name", "push", "hf upload"),
        ("push --help", "push", "hf upload"),
        ("deploy logs gpt-oss-20b --to sagemaker", "deploy logs", "aws logs tail"),
        ("bench smollm2-135m --pass-at-1", "bench --pass-at-1", "lm-eval"),
        ("bench run smollm2-135m --pass-at-1=True --k 3", "bench --pass-at-1", "lm-eval"),
        ("bench openai/gpt-oss-20b --random-weights", "bench --random-weights", "benchmarks/"),
        ("doctor head target --vllm-python python", "doctor --vllm-python", "make test-vllm"),
        ("bench --url http://host:8000/v1", "bench --url", "vllm bench serve"),
        ("bench run smollm2-135m --engine=vllm", "bench --engine", "serve --engine vllm"),
        ("train smollm2-135m --loss cross-entropy", "train --loss", "KL"),
        ("train smollm2-135m --floor 0.1", "train --floor", "--ratio"),
    ],
)
def test_what_is_gone_says_what_does_it_now(refused, line: str, name: str, now: str) -> None:
    assert now in refused(*line.split(), field=name)


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
