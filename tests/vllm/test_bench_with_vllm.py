"""`peagle bench --engine vllm`: a real server, and our engine beside it."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from peagle.cli.main import app
from peagle.heads.find import find_head

pytestmark = pytest.mark.vllm
LOAD = ("--limit", "2", "--max-tokens", "24", "--repeats", "1", "--k", "3", "--dtype", "float32")


def bench(output: Path, *more: str) -> list[dict[str, object]]:
    result: Result = CliRunner().invoke(
        app, ["bench", "smollm2-135m", *LOAD, *more, "--output", str(output)]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert report["complete"]
    return report["rows"]


@pytest.mark.usefixtures("vllm_python")
def test_acceptance_and_tokens_are_ours(tmp_path: Path) -> None:
    shipped = find_head("smollm2-135m", method="p-eagle")
    assert shipped is not None
    head = tmp_path / "head"  # vLLM runs it without its correction
    shutil.copytree(shipped.folder, head, ignore=shutil.ignore_patterns("correction"))
    methods = ("--methods", "p-eagle", "--p-eagle", str(head))
    theirs = bench(tmp_path / "vllm.json", *methods, "--engine", "vllm")
    mine = bench(tmp_path / "native.json", *methods)
    [a], [b] = theirs, mine
    for name in ("method", "requests", "output_tokens", "acceptance_length"):
        assert a[name] == b[name], name
    assert a["accepted_per_position"] == b["accepted_per_position"] != []
