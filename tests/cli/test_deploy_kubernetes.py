"""`peagle deploy --to kubernetes` without a cluster: helm and kubectl are stand-ins, or missing."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from runner import invoke

TO = ("--to", "kubernetes")
MANIFESTS = (*TO, "--as", "manifests")
STAND_IN = """\
#!{python}
import json, sys
given = "" if sys.stdin.isatty() or "-" not in sys.argv else sys.stdin.read()
open({log!r}, "a").write(json.dumps([sys.argv, given]) + "\\n")
print("done")
sys.exit({code})
"""


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def install(folder: Path, program: str, code: int = 0) -> Path:
    """A program that records its arguments and its input."""
    log = folder / f"{program}.log"
    (folder / program).write_text(STAND_IN.format(python=sys.executable, log=str(log), code=code))
    (folder / program).chmod(0o755)
    return log


def test_a_dry_run_prints_yaml_and_needs_nothing(nothing_installed: None) -> None:
    shown = invoke("deploy", "gpt-oss-120b", *MANIFESTS, "--dry-run", "--namespace", "llm").stdout
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(shown)]
    assert kinds == ["Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"]
    again = ("deploy", "start", "gpt-oss-120b", *MANIFESTS, "--namespace", "llm")
    assert shown == invoke(*again).stdout, "the same without --dry-run: --yes runs it"
    stack = invoke("deploy", "gpt-oss-120b", *TO).stdout
    assert "servingEngineSpec" in yaml.safe_load(stack)
    kserve = invoke("deploy", "gpt-oss-120b", *TO, "--as", "kserve").stdout
    assert yaml.safe_load(kserve)["kind"] == "LLMInferenceService"
    ours = invoke("deploy", "smollm2-135m", *TO, "--image", "mine:1").stdout
    assert "kind: Deployment" in ours, "the stack has vLLM only"


def test_head_and_k_are_the_users(nothing_installed: None) -> None:
    named = ("--method", "eagle3", "--k", 4, "--load", 8, "--gpu", "h200")
    shown = invoke("deploy", "openai/gpt-oss-20b", *MANIFESTS, *named).stdout
    deployment, *_ = yaml.safe_load_all(shown)
    pod = deployment["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert (config["model"], config["num_speculative_tokens"]) == (
        "RedHatAI/gpt-oss-20b-speculator.eagle3", 4
    )  # fmt: skip
    assert command[command.index("--max-num-seqs") + 1] == "8" and "affinity" in pod


def test_yes_hands_it_over(nothing_installed: None, tmp_path: Path) -> None:
    helm, kubectl = install(tmp_path, "helm"), install(tmp_path, "kubectl")
    invoke("deploy", "gpt-oss-20b", *TO, "--namespace", "llm", "--yes")
    [[line, given]] = map(json.loads, helm.read_text().splitlines())
    assert line[1:4] == ["upgrade", "--install", "peagle-gpt-oss-20b"]
    assert line[-4:] == ["-n", "llm", "-f", "-"]
    assert given == invoke("deploy", "gpt-oss-20b", *TO, "--namespace", "llm").stdout
    invoke("deploy", "gpt-oss-20b", *MANIFESTS, "--yes")
    [[line, _]] = map(json.loads, kubectl.read_text().splitlines())
    assert line[1:] == ["apply", "-f", "-"]


def test_the_exit_code_is_theirs(nothing_installed: None, tmp_path: Path) -> None:
    install(tmp_path, "helm", code=3)
    invoke("deploy", "gpt-oss-20b", *TO, "--yes", code=3)


def test_bad_input(nothing_installed: None, refused) -> None:
    refused("deploy", "gpt-oss-120b", "--to", "moon", field="to")
    refused("deploy", "gpt-oss-120b", *TO, "--as", "compose", field="form")
    assert "did you mean gpt-oss-120b" in refused("deploy", "gpt-os-120b", *TO)
    refused("deploy", "smollm2-135m", *TO, "--dry-run", field="image")
    line = refused("deploy", "gpt-oss-120b", *TO, "--yes")
    assert line.startswith("peagle: helm is not on the PATH")
