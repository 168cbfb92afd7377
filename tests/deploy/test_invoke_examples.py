"""The examples in docs/deployment.md that ask a deployed model: names, ports and bodies are those
that `peagle deploy` makes."""

import io
import json
import re
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.response import StreamingBody
from botocore.stub import Stubber

from peagle.catalog import find_entry
from peagle.deploy import kubernetes
from peagle.deploy.kubernetes import Cluster
from peagle.deploy.spec import Spec, make_spec

GUIDE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
ANSWER = {"choices": [{"message": {"content": "Red."}}]}


def part(heading: str) -> str:
    """One section of the guide."""
    return GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def spec() -> Spec:
    return make_spec("gpt-oss-20b", find_entry("gpt-oss-20b"), None, remote=True)


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("On this machine", "smollm2-135m"),
        ("Kubernetes", "gpt-oss-20b"),
        ("SageMaker", "gpt-oss-20b"),
    ],
)
def test_bodies_are_questions_to_the_model(heading: str, model: str) -> None:
    [body] = re.findall(r"(?:-d|--body) '(\{.*\})'", part(heading))
    asked = json.loads(body)
    assert asked["model"] == model and find_entry(model)
    assert asked["messages"][0]["role"] == "user"


def test_kubernetes_names_and_ports() -> None:
    shown, cluster = part("Kubernetes"), Cluster("llm")
    manifests = yaml.safe_load_all(kubernetes.dry_run(spec(), cluster))
    found = {each["kind"]: each for each in manifests}
    service = found["Service"]["metadata"]["name"]
    [port] = found["Service"]["spec"]["ports"]
    assert f"kubectl -n llm port-forward service/{service} 8000:{port['port']}\n" in shown
    assert "http://127.0.0.1:8000/v1/chat/completions" in shown
    key = yaml.safe_load(kubernetes.secret(spec(), cluster))
    assert f"get secret {key['metadata']['name']} " in shown
    assert f'{{{{index .data "{next(iter(key["stringData"]))}" | base64decode}}}}' in shown
    assert f"http://{service}.llm.svc/v1" in shown


def test_the_python_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """botocore checks the parameters."""
    [code] = re.findall(r"```python\n(.*?)```", part("SageMaker"), re.DOTALL)
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    client = boto3.client("sagemaker-runtime", region_name="us-west-2", **keys)
    body = json.dumps(ANSWER).encode()
    with Stubber(client) as stub:
        stub.add_response("invoke_endpoint", {"Body": StreamingBody(io.BytesIO(body), len(body))})
        monkeypatch.setattr(boto3, "client", lambda service, region_name: client)
        exec(compile(code, "docs/deployment.md", "exec"), {})
        stub.assert_no_pending_responses()
    assert capsys.readouterr().out == "Red.\n"
    assert f'EndpointName="{spec().resource}"' in code
    assert f"--endpoint-name {spec().resource} " in part("SageMaker")
