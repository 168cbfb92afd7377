"""The style of the whole repository: docstrings, the changelog, the size of benchmarks."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from test_reading_cost import code_lines

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "heads", "packages", "peagle", "tests")
FORBIDDEN = {"what", "who", "whose", "where", "which", "how", "of"}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def bad_docstrings(source: str) -> Iterator[str]:
    """Docstrings whose first word is forbidden, as `line: first line`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, DOCUMENTED):
            continue
        text = ast.get_docstring(node)
        if text and text.split()[0].lower() in FORBIDDEN:
            yield f"{node.body[0].lineno}: {text.splitlines()[0]}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 250
    found = []
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        found += [f"{name}:{line}" for line in bad_docstrings(file.read_text())]
    assert found == []


def test_bad_docstrings_are_found() -> None:
    source = '"""Where it is."""\ndef f():\n    """What f returns."""\ndef g():\n    """Write."""\n'
    assert list(bad_docstrings(source)) == ["1: Where it is.", "3: What f returns."]


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a file of tests by its name alone, so two of one name end a whole run."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_changelog_is_short() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 200


def test_the_benchmarks_stay_small() -> None:
    scripts = list((ROOT / "benchmarks").glob("*.py"))
    lines = sum(code_lines(script.read_text()) for script in scripts)
    assert len(scripts) <= 14 and lines <= 2000
