"""The life of a stack at moto: created, updated, rolled back, invoked, deleted."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from struct import pack
from typing import Any
from zlib import crc32

import boto3
import pytest
from botocore.exceptions import ClientError
from cloudformation_played import REGION, SCALED, CloudFormation
from moto import mock_aws
from moto.sagemaker.models import FakeEndpoint
from refusals import refused

from peagle.catalog import find_entry
from peagle.deploy import sagemaker
from peagle.deploy.plan import Choices, DeployFailed, Plan, make_plan
from peagle.deploy.sagemaker import Account

NAME = "peagle-gpt-oss-20b"
SMALL, LARGE = "ml.g4dn.xlarge", "ml.g4dn.12xlarge"  # the newest that moto knows


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def aws(keys: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudFormation]:
    # moto makes up a name of its own for the endpoint of a stack.
    name_of = staticmethod(lambda: "EndpointName")
    monkeypatch.setattr(FakeEndpoint, "cloudformation_name_type", name_of)
    with mock_aws():
        stacks = CloudFormation()

        def client(service: str, region: str) -> Any:
            played = service == "cloudformation"
            return stacks if played else boto3.client(service, region_name=region)

        monkeypatch.setattr(sagemaker, "client_of", client)
        yield stacks


def plan(**other: Any) -> Plan:
    made = make_plan("gpt-oss-20b", find_entry("gpt-oss-20b"), "sagemaker", Choices())
    return replace(made, **{"instance_type": LARGE, **other})


def apply(wanted: Plan, **account: Any) -> list[str]:
    lines: list[str] = []
    sagemaker.apply(wanted, Account(**account), REGION, lines.append)
    return lines


def there() -> dict[str, int]:
    """Numbers of resources at AWS."""
    client = boto3.client("sagemaker", region_name=REGION)
    return {
        "models": len(client.list_models()["Models"]),
        "configs": len(client.list_endpoint_configs()["EndpointConfigs"]),
        "endpoints": len(client.list_endpoints()["Endpoints"]),
        "roles": len(boto3.client("iam").list_roles()["Roles"]),
    }


ALL = {"models": 1, "configs": 1, "endpoints": 1, "roles": 1}
NOTHING = dict.fromkeys(ALL, 0)


def test_created_and_deleted(aws: CloudFormation) -> None:
    lines = apply(plan())
    assert lines
    assert there() == ALL
    client = boto3.client("sagemaker", region_name=REGION)
    assert client.describe_endpoint(EndpointName=NAME)["EndpointStatus"] == "InService"
    apply(plan(name="gpt-oss-20b-2"))  # whose name begins alike
    lines.clear()
    sagemaker.delete(NAME, REGION, lines.append)
    assert lines[-1] == f"{NAME}: DELETE_COMPLETE"
    assert there() == ALL
    with refused():
        sagemaker.delete(NAME, REGION, lines.append)


def test_moto_reads_the_template(aws: CloudFormation) -> None:
    """Names, mappings and conditions resolve to what AWS would be asked for."""
    apply(plan())
    client = boto3.client("sagemaker", region_name=REGION)
    [listed] = client.list_models()["Models"]
    model = client.describe_model(ModelName=listed["ModelName"])
    image = model["PrimaryContainer"]["Image"]
    assert image == f"763104351884.dkr.ecr.us-west-2.amazonaws.com/{plan().image}"
    [role] = boto3.client("iam").list_roles()["Roles"]
    assert model["ExecutionRoleArn"] == role["Arn"]
    endpoint = client.describe_endpoint(EndpointName=NAME)
    config = client.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
    [variant] = config["ProductionVariants"]
    assert (variant["ModelName"], variant["InstanceType"]) == (listed["ModelName"], LARGE)
    [output] = aws.describe_stacks(StackName=NAME)["Stacks"][0]["Outputs"]
    assert output["OutputValue"] == NAME


def test_the_same_again_changes_nothing(aws: CloudFormation) -> None:
    apply(plan())
    assert apply(plan())[-1] == "nothing has changed"
    assert there() == ALL


def test_updated(aws: CloudFormation) -> None:
    apply(plan())
    assert apply(plan(replicas=2))[-1].endswith(": UPDATE_COMPLETE")
    resources = aws.template(NAME)["Resources"]
    [variant] = resources["EndpointConfig"]["Properties"]["ProductionVariants"]
    assert variant["InitialInstanceCount"] == 2
    assert there() == ALL


def test_an_update_that_fails_is_rolled_back(aws: CloudFormation) -> None:
    apply(plan())
    before = aws.template(NAME)
    aws.broken["Endpoint"] = "the alarm went off:\nupdate was undone"
    with pytest.raises(DeployFailed) as gone:
        apply(plan(replicas=2))
    reason = "Endpoint: the alarm went off: update was undone"
    assert str(gone.value) == f"{reason}; the stack {NAME}: now UPDATE_ROLLBACK_COMPLETE"
    assert aws.template(NAME) == before
    client = boto3.client("sagemaker", region_name=REGION)
    assert client.describe_endpoint(EndpointName=NAME)["EndpointStatus"] == "InService"


def test_a_creation_that_fails_leaves_nothing(aws: CloudFormation) -> None:
    """The reason is that of the first resource, not of those that were cancelled for it."""
    aws.broken["Endpoint"] = "The account-level service limit is 0 Instances"
    with pytest.raises(DeployFailed) as gone:
        apply(plan())
    reason = f"Endpoint: {aws.broken['Endpoint']}"
    assert str(gone.value) == f"{reason}; the stack {NAME}: nothing of it is left"
    assert there() == NOTHING
    aws.broken.clear()
    apply(plan())
    assert there() == ALL


def test_another_instance_type_of_a_scaled_endpoint(aws: CloudFormation) -> None:
    """AWS refuses it while the endpoint is scaled."""
    apply(plan(max_replicas=2))
    before = aws.template(NAME)
    with pytest.raises(DeployFailed, match=f"Endpoint: {SCALED}; .*ROLLBACK"):
        apply(plan(instance_type=SMALL, max_replicas=2))
    assert aws.template(NAME) == before
    for wanted in (plan(), plan(instance_type=SMALL), plan(instance_type=SMALL, max_replicas=2)):
        apply(wanted)
    assert "ScalableTarget" in aws.template(NAME)["Resources"]


def test_an_interrupted_one_goes_on(aws: CloudFormation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that still runs is waited for."""
    apply(plan())
    stack = aws.stack(NAME)
    stack.status = "UPDATE_IN_PROGRESS"
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        stack.status = "UPDATE_COMPLETE"

    monkeypatch.setattr(time, "sleep", sleep)
    lines = apply(plan())
    assert waited == [sagemaker.POLL_SECONDS] and lines[-1] == "nothing has changed"


def test_a_creation_that_fails_while_it_is_waited_for(
    aws: CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(plan())
    stack = aws.stack(NAME)
    stack.status = "CREATE_IN_PROGRESS"
    monkeypatch.setattr(time, "sleep", lambda _: aws.delete_stack(StackName=NAME))
    apply(plan())
    assert aws.asked == ["create", "delete", "create"]
    assert there() == ALL


@pytest.mark.parametrize(
    ("state", "command"),
    [
        ("ROLLBACK_COMPLETE", "`peagle deploy delete`"),
        ("DELETE_FAILED", "`peagle deploy delete`"),
        ("UPDATE_ROLLBACK_FAILED", f"continue-update-rollback --stack-name {NAME}`"),
    ],
)
def test_a_stack_that_failed_half_way(aws: CloudFormation, state: str, command: str) -> None:
    """As `aws cloudformation deploy` leaves it; AWS updates none of these."""
    apply(plan())
    aws.stack(NAME).status = state
    with refused("stack") as error:
        apply(plan(replicas=2))
    assert command in str(error.value.fix)
    assert aws.asked == ["create"]
    sagemaker.delete(NAME, REGION, print)
    apply(plan(replicas=2))
    assert there() == ALL


def test_a_stack_that_others_only_reviewed(aws: CloudFormation) -> None:
    """Nothing ends that state but a change."""
    apply(plan())
    aws.stack(NAME).status = "REVIEW_IN_PROGRESS"
    assert apply(plan())[-1] == "nothing has changed"


def test_missing_permission_is_named(aws: CloudFormation, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "User: me is not authorized to perform: cloudformation:CreateStack on resource: x"

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": why}}, "CreateStack")

    monkeypatch.setattr(aws, "create_stack", refuse)
    with pytest.raises(DeployFailed, match="to perform: cloudformation:CreateStack"):
        apply(plan())
    assert there() == NOTHING


def test_weights_on_s3_are_looked_for_first(aws: CloudFormation) -> None:
    client = boto3.client("s3", region_name=REGION)
    where = {"LocationConstraint": REGION}
    client.create_bucket(Bucket="mine", CreateBucketConfiguration=where)
    weights = "s3://mine/models/gpt-oss/"
    head = f"{weights}head/"
    for file in ("config.json", "o200k_base.tiktoken"):
        with refused("weights") as error:
            apply(plan(head=head), weights=weights)
        assert file in error.value.why
        client.put_object(Bucket="mine", Key=f"models/gpt-oss/{file}", Body=b"{}")
    assert there() == NOTHING
    apply(plan(head=head), weights=weights)
    assert there() == ALL


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("boto3", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused() as error:
        sagemaker.delete(NAME, REGION, print)
    assert error.value.fix == "pip install 'peagle[deploy]'"


def framed(headers: dict[str, str], body: bytes) -> bytes:
    """A message of AWS's event stream (the format: AWS's "event stream encoding")."""
    encoded = b""
    for name, value in headers.items():
        key, text = name.encode(), value.encode()
        encoded += pack(">B", len(key)) + key + pack(">BH", 7, len(text)) + text
    start = pack(">II", len(encoded) + len(body) + 16, len(encoded))
    message = start + pack(">I", crc32(start)) + encoded + body
    return message + pack(">I", crc32(message))


@pytest.fixture
def runtime(keys: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """An endpoint of SageMaker's runtime, which moto lacks; requests are noted."""
    asked: list[Any] = []
    part = {":message-type": "event", ":event-type": "PayloadPart"}
    failure = {":message-type": "exception", ":exception-type": "ModelStreamError"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            parts = [framed(part, text) for text in (b"data: Re", b"d\n\n")]
            if body.get("fails"):
                parts[1] = framed(failure, b'{"Message": "the container went away"}')
            answer = b"".join(parts)
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.amazon.eventstream")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_invoked(runtime: list[Any]) -> None:
    body = {"model": "gpt-oss-20b", "stream": True}
    assert list(sagemaker.invoke(NAME, REGION, body)) == [b"data: Re", b"d\n\n"]
    assert runtime == [(f"/endpoints/{NAME}/invocations-response-stream", body)]


def test_an_answer_that_breaks_off(runtime: list[Any]) -> None:
    parts = sagemaker.invoke(NAME, REGION, {"fails": True})
    assert next(parts) == b"data: Re"
    with pytest.raises(DeployFailed, match="the container went away"):
        next(parts)
