"""Files by which others join: workflows call `make` targets that exist, by pinned actions, and
one version stands everywhere."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from peagle import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_workflows_call_make_and_pinned_actions_only() -> None:
    assert len(WORKFLOWS) == 4
    for file in WORKFLOWS:
        assert file.read_text().startswith("# Not run yet"), file
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            for step in job["steps"]:
                call = step.get("run", "make test").split()
                assert call[0] == "make" and call[1] in TARGETS, (file, step)
                assert re.search(r"@(release/)?v\d", step.get("uses", "@v0")), (file, step)


def test_forms_and_updates_can_be_read() -> None:
    for file in (ROOT / ".github").rglob("*.yml"):
        assert isinstance(yaml.safe_load(file.read_text()), dict), file
    for name in ("bug", "idea"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()


def test_one_version_stands_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert f'"peagle-demo-heads=={__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "heads").glob("*.py")))
def test_scripts_of_the_heads_find_what_they_import(script: str) -> None:
    """They run once a year, and no other test runs them."""
    tree = ast.parse((ROOT / "heads" / f"{script}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("peagle"):
            module = import_module(node.module or "")
            named = [each.name for each in node.names if not hasattr(module, each.name)]
            assert [name for name in named if not find_spec(f"{node.module}.{name}")] == []
