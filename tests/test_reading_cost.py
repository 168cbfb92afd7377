"""Reading cost of each part: the code lines of its entry module and of all that it imports.

A backend is an entry of its own: the engine takes one as an argument and imports none.
Limits go down, never up: what needs more room makes it elsewhere.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = {  # entry module: code lines of it and of all that it imports
    "peagle.engine.engine": 1918,
    "peagle.engine.llm": 5206,
    "peagle.model.drafter": 326,
    "peagle.train.trainer": 1965,
    "peagle.backends.torch": 681,
    "peagle.backends.cuda.backend": 1034,
    "peagle.backends.cpu.backend": 1045,
}
PACKAGE = 15_796
CPP = 1785  # code lines of peagle/backends/cpu/native
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def modules() -> dict[str, Path]:
    """The package's files by module name."""
    found = {}
    for path in sorted((ROOT / "peagle").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def code_lines(source: str) -> int:
    """Lines without blank ones, comments and docstrings."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def imported(tree: ast.AST) -> set[str]:
    """Names that a module imports, inside functions too, but not for types only."""
    names = set[str]()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None, "the package imports by full names"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        left += ast.iter_child_nodes(node)
    return names


def closure(entry: str, known: dict[str, Path]) -> set[str]:
    """A module and all of the package that it imports."""
    seen, left = set[str](), {entry}
    while left:
        module = left.pop()
        seen.add(module)
        left |= (imported(ast.parse(known[module].read_text())) & known.keys()) - seen
    return seen


@pytest.mark.parametrize("entry", LIMITS)
def test_a_part_stays_readable(entry: str) -> None:
    known = modules()
    costs = {name: code_lines(known[name].read_text()) for name in closure(entry, known)}
    largest = sorted(costs.items(), key=lambda item: -item[1])[:8]
    assert sum(costs.values()) <= LIMITS[entry], f"{entry}: {sum(costs.values())} lines; {largest}"


def test_the_package_stays_small() -> None:
    assert sum(code_lines(path.read_text()) for path in modules().values()) <= PACKAGE


def test_the_native_code_stays_small() -> None:
    lines = 0
    for path in (ROOT / "peagle" / "backends" / "cpu" / "native").iterdir():
        stripped = [line.strip() for line in path.read_text().splitlines()]
        lines += sum(bool(line) and not line.startswith("//") for line in stripped)
    assert lines <= CPP


def test_the_counter(tmp_path: Path) -> None:
    source = '"""Two\nlines."""\n\nx = (  # a comment\n    1\n)\n\n\ndef f():\n    """One."""\n'
    assert code_lines(source) == 4
    (tmp_path / "a.py").write_text("def f():\n    from pkg import b\n")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    import pkg.c\n")
    (tmp_path / "c.py").write_text("")
    known = {f"pkg.{name}": tmp_path / f"{name}.py" for name in "abc"}
    assert closure("pkg.a", known) == {"pkg.a", "pkg.b"}
