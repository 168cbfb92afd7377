"""The core names fields; the command line alone names flags, and puts them into messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup

import peagle
from peagle.cli.main import COMMANDS, load_command

ROOT = Path(peagle.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
EXAMPLE = re.compile(r"peagle [a-z][^`)\n]*")  # a command that is shown


def flags(command: TyperCommand | TyperGroup) -> Iterator[str]:
    """Those of a command and of the commands below it."""
    for parameter in command.params:
        yield from (name for name in parameter.opts if name.startswith("--"))
    if isinstance(command, TyperGroup):
        for below in command.commands.values():
            yield from flags(below)


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return {flag for name in COMMANDS for flag in flags(load_command(name))}


def named(source: str) -> set[str]:
    """Flags in the texts of a module; a text that is nothing else is an argument of a program."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    sentences = [text for text in texts if isinstance(text, str) and not FLAG.fullmatch(text)]
    return {flag for text in sentences for flag in FLAG.findall(EXAMPLE.sub("", text))}


def test_flags_are_found() -> None:
    assert named('raise E(f"--k {k}: too few, see --head")') == {"--k", "--head"}
    assert named('line = ["--host", host, "--port"]') == set()
    assert named('"use `peagle train --init-from`, or (peagle eval --k)"') == set()


def test_no_message_of_the_core_names_a_flag(ours: set[str]) -> None:
    assert {"--chat-template", "--max-length", "--k", "--resume"} <= ours
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT)
        if inside.parts[0] != "cli" and (wrong := named(path.read_text()) & ours):
            found[inside.as_posix()] = sorted(wrong)
    assert found == {}
