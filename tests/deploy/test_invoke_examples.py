"""The examples in docs/deployment.md that ask a deployed model: names, ports and bodies are those
that `peagle deploy` makes."""

import io
import json
import re
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber

from peagle.catalog import find_entry
from peagle.deploy.kubernetes import rendered
from peagle.deploy.plan import Choices, Plan, make_plan

GUIDE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
ANSWER = {"choices": [{"message": {"content": "Red."}}]}


def part(heading: str) -> str:
    """One section of the guide."""
    return GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


LARGE = "gpt-oss-20b"


def plan(place: str) -> Plan:
    return make_plan(LARGE, find_entry(LARGE), place, Choices())


@pytest.mark.parametrize("heading", ["Kubernetes", "SageMaker"])
def test_bodies_are_questions_to_the_model(heading: str) -> None:
    [body] = re.findall(r"(?:-d|--body) '(\{.*\})'", part(heading))
    asked = json.loads(body)
    assert asked["model"] == LARGE
    assert asked["messages"][0]["role"] == "user"


def test_kubernetes_names_and_ports() -> None:
    shown = part("Kubernetes")
    printed = rendered(plan("kubernetes"), "stack", "llm", pinned=False)
    [forward] = re.findall(r"kubectl .* port-forward service/(\S+) 8000:80", shown)
    assert forward in printed and "http://127.0.0.1:8000/v1/chat/completions" in shown
    create, get = (
        re.search(pattern, shown.replace("\\\n  ", ""))
        for pattern in (r"kubectl .* create secret .*", r"kubectl .* get secret (\S+) ")
    )
    assert create is not None and create[0] in printed
    assert get is not None and get[1] in create[0]


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
    assert f'EndpointName="{plan("sagemaker").resource}"' in code
    assert f"--endpoint-name {plan('sagemaker').resource} " in part("SageMaker")
