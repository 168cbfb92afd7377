"""The outlook of a model: native or not, from kept costs or from memory, with its sources."""

import json
import re
from pathlib import Path

import pytest
from refusals import refused
from tiny import make_target, save_target
from transformers import GptOssConfig
from typer.testing import CliRunner

from peagle.cli.main import app
from peagle.engine.llm import LLM
from peagle.tools.outlook import TRAINED_A_SECOND, outlook


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
    assert (
        "docs/training.md" in found["a new head"] and "58.7 M answer tokens" in found["a new head"]
    )
    llm = LLM(str(folder), device="cpu")
    assert llm.engine
    curve = llm.shared.verify_curve(40)
    now = outlook(str(folder), "cpu")["tokens a second"]
    assert now == f"{1 / curve(1):.1f} without drafts, measured by an earlier run"


def test_the_hours_are_of_the_measured_rate() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "training_speed.json"
    rows = {row["row"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["p-eagle"]["answer_tokens_per_second"] == TRAINED_A_SECOND


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


def test_only_the_configuration_is_needed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert outlook(str(folder), "cpu")["runs"].startswith("natively")


def test_a_mixture_of_experts(folder: Path) -> None:
    """All experts take memory; a token reads those that it chooses."""
    GptOssConfig(num_local_experts=128, num_experts_per_tok=4).save_pretrained(folder)
    found = outlook(str(folder), "cpu")
    size = float(found["memory"].split()[0])
    [read] = re.findall(r"each reads ([\d.]+) GiB", found["tokens a second"])
    assert 0 < float(read) < size / 10
    assert "too few" in found["memory"], "200 GiB"


def test_without_the_hub_the_catalogs_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = CliRunner().invoke(app, ["doctor", "gpt-oss-20b", "--json"])
    facts = json.loads(done.stdout)
    assert facts["known heads"].startswith("p-eagle, amazon/GPT-OSS-20B-P-EAGLE: HumanEval 3.02")
    assert "eagle3, " in facts["known heads"] and "GiB" in facts["on GPUs, in vLLM"]
    with refused("target"):
        raise done.exception  # type: ignore[misc]
    assert "check the hub id and the network" in str(done.exception)
    done = CliRunner().invoke(app, ["doctor", "owner/model"])
    assert done.stdout == "" and "the network" in str(done.exception)


def test_refusals(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"draft_vocab_size": 9}))
    with refused("head"):
        raise CliRunner().invoke(app, ["doctor", str(folder)]).exception  # type: ignore[misc]
