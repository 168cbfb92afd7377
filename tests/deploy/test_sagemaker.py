"""SageMaker by moto; refusals of AWS and features that moto lacks are patched in."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import httpx2
import pytest
from botocore.exceptions import ClientError, WaiterError
from botocore.session import Session
from botocore.validate import ParamValidator
from moto.server import ThreadedMotoServer
from refusals import refused
from stand_ins import entry

from peagle.catalog import find_entry
from peagle.deploy import sagemaker
from peagle.deploy.container import command
from peagle.deploy.drafting import Drafting
from peagle.deploy.sagemaker import Account
from peagle.deploy.spec import DeployFailed, Spec, make_spec, with_profile

REGION, ROLE = "us-west-2", "arn:aws:iam::123456789012:role/peagle"
ENDPOINT = "peagle-mine"


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


class Client:
    """A client of moto that notes what it is asked, and answers some of it otherwise."""

    def __init__(
        self, inner: Any, asked: list[str], instead: dict[str, Callable[..., Any]]
    ) -> None:
        self._inner, self._asked, self._instead = inner, asked, instead

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        return self._instead.get(name) or getattr(self._inner, name)


class Stage:
    """An account at moto's: what was asked of it, and what is answered otherwise."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.instead: dict[str, Callable[..., Any]] = {}
        self.client = boto3.client("sagemaker", region_name=REGION)

    def client_for(self, service: str, region: str) -> Client:
        return Client(boto3.client(service, region_name=region), self.asked, self.instead)

    def there(self) -> dict[str, list[str]]:
        return {
            "models": [each["ModelName"] for each in self.client.list_models()["Models"]],
            "configs": [
                each["EndpointConfigName"]
                for each in self.client.list_endpoint_configs()["EndpointConfigs"]
            ],
            "endpoints": [
                each["EndpointName"] for each in self.client.list_endpoints()["Endpoints"]
            ],
        }

    def changes(self) -> list[str]:
        """Requests since the last call of this function, except reads."""
        found = [name for name in self.asked if name.startswith(("create", "update", "delete"))]
        self.asked.clear()
        return found


@pytest.fixture
def aws(moto: str, monkeypatch: pytest.MonkeyPatch) -> Stage:
    for name, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    httpx2.post(f"{moto}/moto-api/reset", timeout=10).raise_for_status()
    account = Stage()
    monkeypatch.setattr(sagemaker, "_client", account.client_for)
    return account


def spec(name: str = "mine", **other: Any) -> Spec:
    return make_spec(name, entry(**other), None, remote=True)


def account(**other: Any) -> Account:
    # The newest instances that moto knows.
    return Account(**{"region": REGION, "role": ROLE, "instance_type": "ml.g4dn.12xlarge", **other})


def refusing(operation: str, code: str, message: str) -> Callable[..., Any]:
    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": code, "Message": message}}, operation)

    return refuse


def deploy(spec: Spec, where: Account | None = None) -> list[str]:
    log: list[str] = []
    assert sagemaker.deploy(spec, where or account(), log.append) == spec.resource
    return log


def test_requests_fit_the_published_service_models() -> None:
    """botocore carries them: every name, type and length, and the values where those are listed."""
    big = make_spec("gpt-oss-120b", find_entry("gpt-oss-120b"), None, remote=True)
    wanted = sagemaker.requests(big, account(instance_type="ml.p5.4xlarge", max_replicas=3))
    assert len(wanted) == 5
    for each in wanted:
        service = Session().get_service_model(each.service)
        operation = "".join(word.capitalize() for word in each.operation.split("_"))
        shape = service.operation_model(operation).input_shape
        report = ParamValidator().validate(each.parameters, shape)
        assert not report.has_errors(), report.generate_report()
    shapes = Session().get_service_model("sagemaker")
    [variant] = wanted[1].parameters["ProductionVariants"]
    known = shapes.shape_for("ProductionVariantInferenceAmiVersion").enum
    assert variant["InferenceAmiVersion"] in known


def test_the_environment_of_the_container() -> None:
    profiled = with_profile("gpt-oss-120b", find_entry("gpt-oss-120b"), "benchmark")
    big = make_spec("gpt-oss-120b", profiled, None, remote=True)
    model = json.loads(sagemaker.dry_run(big, account()))[0]["parameters"]["PrimaryContainer"]
    assert model["Image"].startswith("763104351884.dkr.ecr.us-west-2.amazonaws.com/vllm:")
    environment = model["Environment"]
    assert environment["SM_VLLM_MODEL"] == "openai/gpt-oss-120b"
    assert json.loads(environment["SM_VLLM_SPECULATIVE_CONFIG"]) == big.speculative
    assert environment["SM_VLLM_NO_ENABLE_PREFIX_CACHING"] == "true"  # false would say nothing
    assert environment["SM_VLLM_MAX_MODEL_LEN"] == "32768"
    assert environment["VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8"] == "1"


def test_a_deployment_and_its_end(aws: Stage) -> None:
    log = deploy(spec(), account(max_replicas=2))
    assert aws.changes() == ["create_model", "create_endpoint_config", "create_endpoint"]
    assert log[-1] == "made endpoint peagle-mine; it takes minutes to start"
    state = sagemaker.status(ENDPOINT, REGION)
    assert (state["status"], state["instances"], state["failure"]) == ("InService", 1, None)
    scaling = boto3.client("application-autoscaling", region_name=REGION)
    [target] = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 2)
    other = deploy(spec("mine-2"))
    assert len(other) == 3
    deleted = sagemaker.delete(ENDPOINT, REGION)
    assert [name.rpartition(" ")[0] for name in deleted] == ["endpoint", "endpoint config", "model"]
    for names in aws.there().values():  # the other one's, whose names begin alike
        assert len(names) == 1 and names[0].startswith("peagle-mine-2")
    assert not scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    with refused():
        sagemaker.status(ENDPOINT, REGION)


def test_again_changes_nothing(aws: Stage) -> None:
    deploy(spec())
    aws.changes()
    assert deploy(spec()) == ["endpoint peagle-mine is there: InService"]
    assert aws.changes() == []


def test_an_interrupted_deployment_goes_on(aws: Stage) -> None:
    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    aws.instead["create_endpoint"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        deploy(spec())
    aws.instead.clear()
    aws.changes()
    deploy(spec())
    assert aws.changes() == ["create_endpoint"]


def test_what_was_made_is_deleted_on_a_failure(aws: Stage) -> None:
    message = "The account-level service limit is 0 Instances"
    aws.instead["create_endpoint"] = refusing("CreateEndpoint", "ResourceLimitExceeded", message)
    with pytest.raises(
        DeployFailed, match=f"{message}; deleted endpoint config .*, model "
    ) as gone:
        deploy(spec())
    assert "\n" not in str(gone.value)
    assert aws.there() == {"models": [], "configs": [], "endpoints": []}


def test_scaling_that_is_refused_takes_all_with_it(aws: Stage) -> None:
    why = "me is not authorized to perform: application-autoscaling:PutScalingPolicy on x"
    aws.instead["put_scaling_policy"] = refusing("PutScalingPolicy", "AccessDeniedException", why)
    gone = "deleted scaling of endpoint/peagle-mine/variant/all, endpoint peagle-mine, "
    with pytest.raises(DeployFailed, match=f"application-autoscaling:PutScalingPolicy.*{gone}"):
        deploy(spec(), account(max_replicas=2))
    assert aws.there() == {"models": [], "configs": [], "endpoints": []}
    scaling = boto3.client("application-autoscaling", region_name=REGION)
    assert not scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]


def test_what_was_there_before_stays_on_a_failure(aws: Stage) -> None:
    deploy(spec())
    before = aws.there()
    aws.instead["create_endpoint_config"] = refusing("CreateEndpointConfig", "Throttling", "slow")
    with pytest.raises(DeployFailed, match="slow.*; nothing had been made"):
        deploy(spec(), account(replicas=2))  # of the same model, in another configuration
    assert aws.there() == before


def test_a_missing_permission_is_named(aws: Stage) -> None:
    why = "User: me is not authorized to perform: sagemaker:CreateModel on resource: x"
    aws.instead["create_model"] = refusing("CreateModel", "AccessDeniedException", why)
    with pytest.raises(DeployFailed, match="the permission sagemaker:CreateModel is missing"):
        deploy(spec())


def test_what_cannot_be_deleted_is_said(aws: Stage) -> None:
    aws.instead["create_endpoint"] = refusing("CreateEndpoint", "Throttling", "slow")
    aws.instead["delete_model"] = refusing("DeleteModel", "Throttling", "slow, too")
    with pytest.raises(
        DeployFailed, match="deleted endpoint config .*NOT deleted: model peagle-mi"
    ):
        deploy(spec())


def test_an_endpoint_that_does_not_start(aws: Stage) -> None:
    class Waiter:
        def wait(self, **_: Any) -> None:
            raise WaiterError("EndpointInService", "failed", {})

    aws.instead["get_waiter"] = lambda _: Waiter()
    real = aws.client.describe_endpoint
    aws.instead["describe_endpoint"] = lambda **name: {**real(**name), "FailureReason": "no image"}
    with pytest.raises(
        DeployFailed, match="did not come into service: no image; deleted endpoint "
    ):
        deploy(spec())
    assert aws.there() == {"models": [], "configs": [], "endpoints": []}


def test_an_endpoint_that_failed_before_is_made_again(aws: Stage) -> None:
    deploy(spec())
    real = aws.client.describe_endpoint

    def failed_once(**name: Any) -> Any:
        del aws.instead["describe_endpoint"]
        return {**real(**name), "EndpointStatus": "Failed", "FailureReason": "no image"}

    class Gone:
        def wait(self, **_: Any) -> None:
            pass

    inner = aws.client.get_waiter
    aws.instead["describe_endpoint"] = failed_once
    aws.instead["get_waiter"] = lambda name: Gone() if name == "endpoint_deleted" else inner(name)
    aws.changes()
    log = deploy(spec())
    assert log[0] == "deleting endpoint peagle-mine, which failed: no image"
    assert aws.changes() == ["delete_endpoint", "create_endpoint"]


def test_another_configuration_moves_the_endpoint(aws: Stage) -> None:
    """moto has no update_endpoint: what it would be given is looked at."""
    deploy(spec())
    aws.changes()
    moved: list[dict[str, str]] = []
    aws.instead["update_endpoint"] = lambda **given: moved.append(given)
    deploy(spec(vllm_flags={"max-model-len": 4096}))
    assert aws.changes() == ["create_model", "create_endpoint_config", "update_endpoint"]
    [given] = moved
    assert given["EndpointName"] == ENDPOINT
    assert given["EndpointConfigName"] in aws.there()["configs"]


def test_logs(aws: Stage) -> None:
    with pytest.raises(DeployFailed, match="log group does not exist"):
        sagemaker.logs(ENDPOINT, REGION, 2)
    client = boto3.client("logs", region_name=REGION)
    group = {"logGroupName": f"/aws/sagemaker/Endpoints/{ENDPOINT}"}
    client.create_log_group(**group)
    assert sagemaker.logs(ENDPOINT, REGION, 2) == []
    client.create_log_stream(**group, logStreamName="all/i-1")
    now = 1000 * int(time.time())
    events = [{"timestamp": now + at, "message": f"line {at}"} for at in range(3)]
    client.put_log_events(**group, logStreamName="all/i-1", logEvents=events)
    assert sagemaker.logs(ENDPOINT, REGION, 2) == ["line 1", "line 2"]


def test_our_engine_is_served_by_an_image_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """SageMaker's container gets by variables what other engines get as a command line."""
    monkeypatch.setenv("PATH", "")
    demo, pinned = find_entry("smollm2-135m"), Drafting(k=2)
    named = ["--head", "owner/head"]
    for spec, head in (
        (make_spec("smollm2-135m", demo, None, remote=True), []),
        (make_spec("smollm2-135m", demo, None, remote=True, drafting=pinned), ["--k", "2"]),
        (make_spec("mine", entry(), "native", remote=True), named),
        (make_spec("mine", entry(), "native", remote=True, drafting=pinned), [*named, "--k", "2"]),
    ):
        with refused("image"):
            sagemaker.requests(spec, account())
        model, config, *_ = sagemaker.requests(spec, account(image="mine:1"))
        container = model.parameters["PrimaryContainer"]
        assert container["Image"] == "mine:1"
        line = command(container["Environment"])
        assert line[:4] == ["serve", spec.target, "--engine", "native"]
        assert line[line.index("--served-model-name") + 1] == spec.name
        assert line[-len(head) :] == head or not head
        [variant] = config.parameters["ProductionVariants"]
        assert ("InferenceAmiVersion" in variant) == (spec.gpus > 0)


def test_our_image_reads_what_the_container_of_aws_does() -> None:
    spec = make_spec("gpt-oss-20b", find_entry("gpt-oss-20b"), None, remote=True)
    model, *_ = sagemaker.requests(spec, account(image="mine:1"))
    environ = model.parameters["PrimaryContainer"]["Environment"] | {"PEAGLE_ENGINE": "vllm"}
    line = command(environ)
    assert line[1] == "openai/gpt-oss-20b" and "--async-scheduling" in line
    assert json.loads(line[line.index("--speculative-config") + 1]) == spec.speculative


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("boto3", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused() as error:
        sagemaker.status(ENDPOINT, REGION)
    assert error.value.fix == "pip install 'peagle[deploy]'"
