"""`peagle deploy --to kubernetes`, without a cluster: kubectl is a stand-in, or missing."""

import json
from pathlib import Path

import pytest
import yaml
from runner import invoke
from typer.testing import CliRunner

from peagle.cli.main import app
from peagle.deploy import kubernetes

TO = ("--to", "kubernetes")


@pytest.fixture
def no_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_dry_run_prints_yaml_and_needs_nothing(no_kubectl: None) -> None:
    shown = invoke("deploy", "gpt-oss-120b", *TO, "--dry-run", "--namespace", "models").stdout
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(shown)]
    assert "Deployment" in kinds and "Secret" not in kinds
    assert (
        shown == invoke("deploy", *TO, "gpt-oss-120b", "--dry-run", "--namespace", "models").stdout
    )
    assert shown == invoke("deploy", "start", "gpt-oss-120b", *TO, "--dry-run", "--namespace",
                           "models").stdout  # fmt: skip


def test_head_and_k_are_the_users(no_kubectl: None) -> None:
    named = ("--head", "me/my-eagle3", "--method", "eagle3", "--k", 4)
    shown = invoke("deploy", "openai/gpt-oss-20b", *TO, "--dry-run", *named)
    [deployment] = [
        manifest
        for manifest in yaml.safe_load_all(shown.stdout)
        if manifest["kind"] == "Deployment"
    ]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    config = command[command.index("--speculative-config") + 1]
    assert json.loads(config) == {
        "method": "eagle3", "model": "me/my-eagle3", "num_speculative_tokens": 4
    }  # fmt: skip


def test_without_kubectl(no_kubectl: None, refused) -> None:
    line = refused("deploy", "gpt-oss-120b", *TO, "--yes")
    assert line.startswith("peagle: kubectl is not on the PATH")


def test_nothing_is_started_without_a_yes(no_kubectl: None, refused) -> None:
    for command in (("deploy", "gpt-oss-120b"), ("deploy", "delete", "gpt-oss-120b")):
        assert "give --yes" in refused(*command, *TO)


def test_bad_input(no_kubectl: None, refused) -> None:
    refused("deploy", "gpt-oss-120b", "--to", "moon", field="to")
    assert "did you mean gpt-oss-120b" in refused("deploy", "gpt-os-120b", *TO)
    refused("deploy", "smollm2-135m", *TO, "--dry-run", field="image")


def test_what_kubectl_says_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def answer(cluster: kubernetes.Cluster, *arguments: str, given: str | None = None) -> str:
        calls.append(arguments[0])
        return f"{cluster.namespace}: {arguments[0]}\n"

    monkeypatch.setattr(kubernetes, "_kubectl", answer)
    shown = invoke("deploy", "gpt-oss-120b", *TO, "--yes", "--namespace", "models").stdout
    assert "models: apply" in shown and "http://peagle-gpt-oss-120b.models.svc/v1" in shown
    for verb, asked in (("status", "get"), ("logs", "logs"), ("delete", "delete")):
        yes = ["--yes"] if verb == "delete" else []
        assert invoke("deploy", verb, "gpt-oss-120b", *TO, *yes).stdout == f"default: {asked}\n"
    assert calls == ["get", "apply", "get", "logs", "delete"]


def test_a_failure_is_a_line_and_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise kubernetes.DeployFailed("kubectl get ended with code 1: no cluster")

    monkeypatch.setattr(kubernetes, "_kubectl", fail)
    result = CliRunner().invoke(app, ["deploy", "status", "gpt-oss-120b", *TO])
    assert result.exit_code == 1
    assert result.stderr == "peagle: kubectl get ended with code 1: no cluster\n"
