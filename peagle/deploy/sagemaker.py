"""SageMaker: a model, an endpoint configuration and an endpoint, served by AWS's container of vLLM
or by an image of peagle (`container.py`). boto3 is imported when it is needed.

Models and configurations cannot be changed there, so their names end in a digest of their content:
one that is found by its name is the one that is wanted. The endpoint keeps its name and is moved
from one configuration to the next.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from peagle.deploy.render import render
from peagle.deploy.spec import DeployFailed, Spec, image_for
from peagle.errors import InputError, first_line

# AWS's vLLM container, as its documentation names it; a few regions have another account.
IMAGE = "763104351884.dkr.ecr.{region}.amazonaws.com/vllm:server-sagemaker-cuda-v1"
SAGEMAKER = "sagemaker"
SCALING, REGISTER = "application-autoscaling", "register_scalable_target"
POLL_SECONDS = 30
MAX_POLLS = 240  # a download of weights and a start, an hour each
# Placeholders of a dry run for missing values, by the names of Account's fields.
PLACEHOLDERS = {"region": "REGION", "role": "ROLE_ARN", "instance_type": "INSTANCE_TYPE"}


@dataclass(frozen=True, slots=True)
class Account:
    """Region, role, and instances of a deployment; checked, except placeholders."""

    region: str
    role: str  # the execution role's ARN
    instance_type: str
    image: str | None = None  # None: AWS's own
    replicas: int = 1
    max_replicas: int | None = None  # None: always `replicas`

    def __post_init__(self) -> None:
        is_arn = re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+", self.role)
        if not is_arn and self.role != PLACEHOLDERS["role"]:
            why = "is no ARN of a role (arn:aws:iam::ACCOUNT:role/NAME)"
            raise InputError(why, field="role", value=self.role)
        is_type = self.instance_type.startswith("ml.")
        if not is_type and self.instance_type != PLACEHOLDERS["instance_type"]:
            why = "is no type of SageMaker's, which begin with 'ml.'"
            raise InputError(why, field="instance_type", value=self.instance_type)
        if self.replicas < 1:
            raise InputError("must be at least 1", field="replicas", value=self.replicas)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            why = f"must be at least `replicas` ({self.replicas})"
            raise InputError(why, field="max_replicas", value=self.max_replicas)


@dataclass(frozen=True, slots=True)
class Request:
    """A call of an AWS service that makes something."""

    service: str
    operation: str
    parameters: dict[str, Any]

    @property
    def kind(self) -> str:
        """The kind of resource it makes, as in boto3's method names."""
        return self.operation.removeprefix("create_").removeprefix("register_")

    @property
    def identity(self) -> dict[str, Any]:
        """Its first parameters, which identify the resource when it is described or deleted."""
        count = len(_variant("")) if self.operation == REGISTER else 1
        return dict(list(self.parameters.items())[:count])

    def __str__(self) -> str:
        """The resource for messages: "model peagle-x-0123"."""
        if self.operation == REGISTER:
            return f"scaling of {self.parameters['ResourceId']}"
        [name] = self.identity.values()
        return f"{self.kind.replace('_', ' ')} {name}"


def requests(spec: Spec, account: Account) -> list[Request]:
    """All requests for a new endpoint, in order: model, configuration, endpoint, scaling.
    Raises InputError for an engine without a published image."""
    text = render(
        "sagemaker.yaml.j2",
        spec=spec,
        account=account,
        image=image_for(spec, account.image, IMAGE.format(region=account.region)),
        environment=_environment(spec),
        variant=_variant(spec.resource),
    )
    content = yaml.safe_load(text)
    model = _with_name("ModelName", spec, content["model"])
    [variant] = content["config"]["ProductionVariants"]
    variant["ModelName"] = model["ModelName"]
    config = _with_name("EndpointConfigName", spec, content["config"])
    config_name = config["EndpointConfigName"]
    endpoint = {"EndpointName": spec.resource, "EndpointConfigName": config_name}
    return [
        Request(SAGEMAKER, "create_model", model),
        Request(SAGEMAKER, "create_endpoint_config", config),
        Request(SAGEMAKER, "create_endpoint", endpoint),
        *(Request(**each) for each in content["scaling"]),
    ]


def dry_run(spec: Spec, account: Account) -> str:
    """The requests that would be sent, as JSON."""
    return json.dumps([asdict(each) for each in requests(spec, account)], indent=1)


def deploy(spec: Spec, account: Account, report: Callable[[str], None]) -> str:
    """Make the missing resources, wait for the endpoint, and return its name.

    After an interruption all resources stay, and the next call continues. If SageMaker fails or
    refuses, the resources that this call made are deleted again; the error lists them.
    """
    model, config, endpoint, *scaling = requests(spec, account)
    region, made = account.region, list[Request]()
    try:
        for wanted in (model, config):
            if _describe(wanted, region) is None:
                _send(wanted, region)
                made.append(wanted)
                report(f"made {wanted}")
        if _bring_up(endpoint, region, report):
            made.append(endpoint)
        _wait(endpoint, region)
        for each in scaling:
            _send(each, region)
            if endpoint in made and each.operation == REGISTER:
                made.append(each)
    except DeployFailed as error:
        raise DeployFailed(f"{error}; {_delete_all(made, region)}") from error
    return spec.resource


def status(endpoint: str, region: str) -> dict[str, Any]:
    """The endpoint's state, and the reason of a failure."""
    found = _describe(_making("endpoint", endpoint), region)
    if found is None:
        raise InputError(f"no endpoint {endpoint} in {region}")
    variants = found.get("ProductionVariants", [])
    return {
        "endpoint": endpoint,
        "status": found["EndpointStatus"],
        "config": found["EndpointConfigName"],
        "instances": sum(variant.get("CurrentInstanceCount", 0) for variant in variants),
        "failure": found.get("FailureReason"),
    }


def logs(endpoint: str, region: str, lines: int) -> list[str]:
    """The last lines its containers wrote to CloudWatch."""
    group = {"logGroupName": f"/aws/sagemaker/Endpoints/{endpoint}"}
    newest = {**group, "orderBy": "LastEventTime", "descending": True, "limit": 1}
    streams = _call("logs", region, "describe_log_streams", newest)["logStreams"]
    if not streams:
        return []
    asked = {**group, "logStreamName": streams[0]["logStreamName"], "limit": lines}
    events = _call("logs", region, "get_log_events", asked)["events"]
    return [event["message"] for event in events]


def delete(endpoint: str, region: str) -> list[str]:
    """Delete the endpoint and every configuration and model made for it; returns their names."""
    running = _making("endpoint", endpoint)
    found = [running] if _describe(running, region) else []
    for kind in ("endpoint_config", "model"):
        found += _made_for(endpoint, kind, region)
    variant = _variant(endpoint)
    asked = {"ServiceNamespace": SAGEMAKER, "ResourceIds": [variant["ResourceId"]]}
    if _call(SCALING, region, "describe_scalable_targets", asked)["ScalableTargets"]:
        _delete(Request(SCALING, REGISTER, variant), region)
    for each in found:
        _delete(each, region)
    return [str(each) for each in found]


def _made_for(endpoint: str, kind: str, region: str) -> list[Request]:
    """Models or configurations made for an endpoint. Those of another endpoint may begin alike,
    but do not go on with a digest."""
    paginator = _client(SAGEMAKER, region).get_paginator(f"list_{kind}s")
    with _failures():
        listed = paginator.paginate(NameContains=endpoint).build_full_result()
    names = [item[f"{_camel(kind)}Name"] for item in listed[f"{_camel(kind)}s"]]
    pattern = re.compile(re.escape(endpoint) + r"-[0-9a-f]{12}")
    return [_making(kind, name) for name in names if pattern.fullmatch(name)]


def _making(kind: str, name: str) -> Request:
    """The request that makes a model, configuration or endpoint, as far as its name."""
    return Request(SAGEMAKER, f"create_{kind}", {f"{_camel(kind)}Name": name})


def _camel(kind: str) -> str:
    return "".join(word.capitalize() for word in kind.split("_"))


def _environment(spec: Spec) -> dict[str, str]:
    """The container's variables. AWS's makes --a-b VALUE of SM_VLLM_A_B, and a bare --a-b of the
    value true; so does ours, for the options that the native engine has."""
    options = {"model": spec.model, "served-model-name": spec.name}
    engine = {}
    if spec.engine == "native":
        engine["PEAGLE_ENGINE"] = "native"
        head = {"model": spec.drafting.head, "num_speculative_tokens": spec.drafting.k}
        drafting = {name: value for name, value in head.items() if value is not None}
        if drafting:
            options["speculative-config"] = json.dumps(drafting)
    for flag, value in spec.vllm_options().items():
        name = f"no-{flag}" if value is False else flag
        options[name] = "true" if isinstance(value, bool) else str(value)
    named = {"SM_VLLM_" + name.upper().replace("-", "_"): text for name, text in options.items()}
    return {**named, **engine, **spec.env}


def _variant(endpoint: str) -> dict[str, str]:
    """The scalable target: the endpoint's number of instances."""
    return {
        "ServiceNamespace": SAGEMAKER,
        "ResourceId": f"endpoint/{endpoint}/variant/all",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def _with_name(key: str, spec: Spec, content: dict[str, Any]) -> dict[str, Any]:
    """Parameters after a name that ends in their digest."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {key: f"{spec.resource}-{digest[:12]}", **content}


def _bring_up(endpoint: Request, region: str, report: Callable[[str], None]) -> bool:
    """Make the endpoint, or move the one that is there; True when it was made here."""
    found = _describe(endpoint, region)
    if found and found["EndpointStatus"] == "Failed":
        report(f"deleting {endpoint}, which failed: {found.get('FailureReason')}")
        _delete(endpoint, region)
        _wait_until("endpoint_deleted", endpoint, region)
        found = None
    if found is None:
        _send(endpoint, region)
        report(f"made {endpoint}; it takes minutes to start")
        return True
    if found["EndpointConfigName"] != endpoint.parameters["EndpointConfigName"]:
        _wait(endpoint, region)  # one that is being changed cannot be changed
        _call(SAGEMAKER, region, "update_endpoint", endpoint.parameters)
        report(f"moving {endpoint} to what is asked for now")
    else:
        report(f"{endpoint} is there: {found['EndpointStatus']}")
    return False


def _wait_until(state: str, endpoint: Request, region: str) -> None:
    polls = {"Delay": POLL_SECONDS, "MaxAttempts": MAX_POLLS}
    with _failures():
        waiter = _client(SAGEMAKER, region).get_waiter(state)
        waiter.wait(**endpoint.identity, WaiterConfig=polls)


def _wait(endpoint: Request, region: str) -> None:
    try:
        _wait_until("endpoint_in_service", endpoint, region)
    except DeployFailed as error:
        found = _describe(endpoint, region) or {}
        why = found.get("FailureReason") or error
        raise DeployFailed(f"{endpoint} did not come into service: {why}") from error


def _delete_all(made: list[Request], region: str) -> str:
    """Delete what was made, newest first; return what was deleted and what could not be."""
    deleted, left = list[str](), list[str]()
    for each in reversed(made):
        try:
            _delete(each, region)
            deleted.append(str(each))
        except DeployFailed as error:
            left.append(f"{each} ({error})")
    parts = list[str]()
    if deleted:
        parts.append(f"deleted {', '.join(deleted)}")
    if left:
        parts.append(f"NOT deleted: {', '.join(left)}")
    return "; ".join(parts) or "nothing had been made"


def _describe(made: Request, region: str) -> dict[str, Any] | None:
    """The resource's description, or None."""
    try:
        return _call(made.service, region, f"describe_{made.kind}", made.identity)
    except DeployFailed as error:
        if "Could not find" in str(error):  # its code is that of any bad request
            return None
        raise


def _delete(made: Request, region: str) -> None:
    verb = "deregister" if made.operation == REGISTER else "delete"
    _call(made.service, region, f"{verb}_{made.kind}", made.identity)


def _send(request: Request, region: str) -> None:
    _call(request.service, region, request.operation, request.parameters)


def _call(service: str, region: str, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
    client = _client(service, region)
    with _failures():
        return dict(getattr(client, operation)(**parameters) or {})


@contextmanager
def _failures() -> Iterator[None]:
    """Raise DeployFailed where AWS refuses, fails or cannot be reached. It names the permission
    that is missing, where one is."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        message = first_line(error)
        missing = re.search(r"not authorized to perform: (\S+)", message)
        if missing:
            message = f"the permission {missing[1]} is missing ({message})"
        raise DeployFailed(message) from error


def _client(service: str, region: str) -> Any:
    try:
        import boto3  # noqa: PLC0415
    except ImportError as error:
        fix = "pip install 'peagle[deploy]'"
        raise InputError("SageMaker needs boto3", fix=fix) from error
    return boto3.client(service, region_name=region)
