"""The outlook of a model: native or not, from kept costs or from memory, with its sources."""

import json
from pathlib import Path

import pytest
from refusals import refused
from tiny import make_target, save_target
from typer.testing import CliRunner

from peagle.catalog import find_entry
from peagle.cli.main import app
from peagle.engine.llm import LLM
from peagle.tools.outlook import outlook


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("peagle.tools.outlook.SAMPLE", 2**16)
    return save_target(make_target(), tmp_path / "target")


def test_estimated_at_first_and_measured_by_a_run(folder: Path) -> None:
    found = outlook(str(folder), "cpu")
    assert found["family"] == "llama" and found["runs"].startswith("natively")
    assert "float32 weights" in found["memory"] and "KiB of KV cache a token" in found["memory"]
    assert "estimated" in found["tokens a second"]
    assert found["known heads"] == "none; lookup drafts without one"
    assert "docs/training.md" in found["a new head"] and "34.5 M tokens" in found["a new head"]
    llm = LLM(str(folder), device="cpu")
    assert llm.engine
    curve = llm._setup.shared.verify_curve(40)
    now = outlook(str(folder), "cpu")["tokens a second"]
    assert now == f"{1 / curve(1):.1f} without drafts, measured by an earlier run"


def test_the_command(folder: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(folder), "--json"])
    assert json.loads(done.stdout).keys() == outlook(str(folder), "cpu").keys()
    assert "natively" in CliRunner().invoke(app, ["doctor", str(folder)]).stdout


def test_the_models_own_code(folder: Path) -> None:
    """A family without a description: transformers' code runs it, and no weight is read."""
    config = folder / "config.json"
    other = json.loads(config.read_text()) | {"hidden_act": "relu"}
    config.write_text(json.dumps(other))
    (folder / "model.safetensors").unlink()
    found = outlook(str(folder), "cpu")
    assert found["runs"].startswith("by the model's own code")


def test_heads_of_the_catalog(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = find_entry("qwen3-8b")
    monkeypatch.setattr("peagle.tools.outlook.known_entry", lambda _: entry)
    found = outlook(str(folder), "cpu")["known heads"]
    assert found.startswith("p-eagle: HumanEval 3.50 (K = 7)") and "eagle3: " in found


def test_refusals(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"draft_vocab_size": 9}))
    with refused("head"):
        raise CliRunner().invoke(app, ["doctor", str(folder)]).exception  # type: ignore[misc]
