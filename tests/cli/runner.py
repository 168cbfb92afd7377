"""The command line in this process: a tiny target's folder, and how to call a command."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
from click.testing import Result
from json_files import read_lines, write_lines
from tiny import make_target, own_answers
from typer.testing import CliRunner

from peagle.cli.main import app

Refused = Callable[..., str]  # see conftest.py
Words = tuple[object, ...]  # of a command line
PEAGLE = Path(sys.executable).parent / "peagle"
LAYERS = 7  # the fewest that have default feature layers
SMALL = ("--layers", "2", "--depths", "4", "--draft-vocab", "112", "--lr", "3e-3")


def invoke(*args: object, code: int = 0, stdin: str | None = None, **how: Any) -> Result:
    """Run a command that must end with this code; `how` is for click's runner."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, **how)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def printed(*args: object) -> Any:
    """The JSON that a command with --json prints: all of stdout."""
    return json.loads(invoke(*args, "--json").stdout)


def save_target(folder: Path, *, seed: int = 0, context: int = 256) -> Path:
    return tiny.save_target(make_target(seed=seed, layers=LAYERS, context=context), folder)


def save_answers(file: Path, count: int = 24) -> Path:
    """The target's own answers, as `peagle data regenerate` writes them."""
    lines = []
    for number, example in enumerate(own_answers(make_target(layers=LAYERS), count)):
        start = example.supervised.index(True)
        ids = {"prompt_ids": example.ids[:start], "answer_ids": example.ids[start:]}
        lines.append({"record": number, **ids})
    return write_lines(file, *lines)


def metrics(output: Path) -> list[dict[str, Any]]:
    """Lines of a training run's metrics.jsonl."""
    return read_lines(output / "metrics.jsonl")
