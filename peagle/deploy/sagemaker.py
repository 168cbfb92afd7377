"""SageMaker: a model, an endpoint configuration and an endpoint that serves through AWS's container
of vLLM, or through an image of ours (`container.py`); boto3 is imported when it is called.

Models and configurations cannot be changed there, so their names carry a digest of what they say:
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

from peagle.deploy.account import Account
from peagle.deploy.render import render
from peagle.deploy.spec import DeployFailed, Spec, image_for
from peagle.errors import InputError, first_line

# AWS's vLLM container, as its documentation names it; a few regions have another account.
IMAGE = "763104351884.dkr.ecr.{region}.amazonaws.com/vllm:server-sagemaker-cuda-v1"
SCALING, REGISTER = "application-autoscaling", "register_scalable_target"
POLL_SECONDS = 30
MAX_POLLS = 240  # a download of weights and a start, an hour each


@dataclass(frozen=True, slots=True)
class Request:
    """A call of an AWS service, most of which make something."""

    service: str
    operation: str
    parameters: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """The parameters by which what it makes is found: a name, or what is scaled."""
        names = list(self.parameters)[: 3 if self.service == SCALING else 1]
        return {name: self.parameters[name] for name in names}

    @property
    def kind(self) -> str:
        """What it makes, as boto3's method names have it."""
        return self.operation.removeprefix("create_")

    def undo(self) -> "Request":
        """The request that deletes what it makes."""
        undo = "deregister_scalable_target" if self.operation == REGISTER else f"delete_{self.kind}"
        return Request(self.service, undo, self.identity)

    def __str__(self) -> str:
        """What it makes, as people say: "model peagle-x-0123"."""
        if self.operation == REGISTER:
            return f"scaling of {self.parameters['ResourceId']}"
        [name] = self.identity.values()
        return f"{self.kind.replace('_', ' ')} {name}"


def requests(spec: Spec, account: Account) -> list[Request]:
    """All that is sent for a new endpoint, in order: model, configuration, endpoint, scaling.
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
    endpoint = {
        "EndpointName": spec.resource,
        "EndpointConfigName": config["EndpointConfigName"],
    }
    return [
        Request("sagemaker", "create_model", model),
        Request("sagemaker", "create_endpoint_config", config),
        Request("sagemaker", "create_endpoint", endpoint),
        *(Request(**each) for each in content["scaling"]),
    ]


def dry_run(spec: Spec, account: Account) -> str:
    """What would be sent, as JSON."""
    return json.dumps([asdict(each) for each in requests(spec, account)], indent=1)


def deploy(spec: Spec, account: Account, say: Callable[[str], None]) -> str:
    """Make what is not there yet, wait for the endpoint, and return its name.

    Interrupted, everything stays, and the next call goes on from there. When SageMaker fails or
    refuses, what this call made is deleted again, and the error says so.
    """
    model, config, endpoint, *scaling = requests(spec, account)
    client, made = _client("sagemaker", account.region), list[Request]()
    try:
        for wanted in (model, config):
            if _describe(client, wanted) is None:
                _send(client, wanted)
                made.append(wanted)
                say(f"made {wanted}")
        if _bring_up(client, endpoint, say):
            made.append(endpoint)
        _wait(client, endpoint)
        for each in scaling:
            _send(_client(SCALING, account.region), each)
            if endpoint in made and each.operation == REGISTER:
                made.append(each)
    except DeployFailed as error:
        raise DeployFailed(f"{error}; {_undo_all(account.region, made)}") from error
    return spec.resource


def status(endpoint: str, region: str) -> dict[str, Any]:
    """The endpoint's state, and why it failed where it did."""
    found = _describe(_client("sagemaker", region), _making("endpoint", endpoint))
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
    client = _client("logs", region)
    group = f"/aws/sagemaker/Endpoints/{endpoint}"
    with _failures():
        streams = client.describe_log_streams(
            logGroupName=group, orderBy="LastEventTime", descending=True, limit=1
        )["logStreams"]
        if not streams:
            return []
        name = streams[0]["logStreamName"]
        found = client.get_log_events(logGroupName=group, logStreamName=name, limit=lines)
    return [event["message"] for event in found["events"]]


def delete(endpoint: str, region: str) -> list[str]:
    """Delete the endpoint and every configuration and model made for it; returns their names."""
    client = _client("sagemaker", region)
    running = _making("endpoint", endpoint)
    found = [running] if _describe(client, running) else []
    for kind in ("endpoint_config", "model"):
        found += _made_for(client, endpoint, kind)
    scaling, variant = _client(SCALING, region), _variant(endpoint)
    with _failures():
        scaled = scaling.describe_scalable_targets(
            ServiceNamespace=variant["ServiceNamespace"], ResourceIds=[variant["ResourceId"]]
        )
    if scaled["ScalableTargets"]:
        _send(scaling, Request(SCALING, REGISTER, dict(variant)).undo())
    for each in found:
        _send(client, each.undo())
    return [str(each) for each in found]


def _made_for(client: Any, endpoint: str, kind: str) -> list[Request]:
    """Models or configurations made for an endpoint. Names that begin alike may be another
    endpoint's: ours end in a digest."""
    with _failures():
        pages = client.get_paginator(f"list_{kind}s").paginate(NameContains=endpoint)
        listed = pages.build_full_result()
    named = _camel(kind)
    names = [item[f"{named}Name"] for item in listed[f"{named}s"]]
    ours = re.compile(re.escape(endpoint) + r"-[0-9a-f]{12}")
    return [_making(kind, name) for name in names if ours.fullmatch(name)]


def _making(kind: str, name: str) -> Request:
    """The request that would make a model, configuration or endpoint, as far as it names it."""
    return Request("sagemaker", f"create_{kind}", {f"{_camel(kind)}Name": name})


def _camel(kind: str) -> str:
    return "".join(word.capitalize() for word in kind.split("_"))


def _environment(spec: Spec) -> dict[str, str]:
    """AWS's container makes --a-b VALUE of SM_VLLM_A_B, a bare --a-b of the value true; so does
    ours, for the options that our engine has."""
    options = {"model": spec.model, "served-model-name": spec.name}
    ours = {}
    if spec.engine == "native":
        ours["PEAGLE_ENGINE"] = "native"
        told = {"model": spec.head, "num_speculative_tokens": spec.k}
        drafting = {name: value for name, value in told.items() if value is not None}
        if drafting:
            options["speculative-config"] = json.dumps(drafting)
    for flag, value in spec.vllm_options().items():
        name = f"no-{flag}" if value is False else flag
        options[name] = "true" if isinstance(value, bool) else str(value)
    named = {"SM_VLLM_" + name.upper().replace("-", "_"): text for name, text in options.items()}
    return {**named, **ours, **spec.env}


def _variant(endpoint: str) -> dict[str, str]:
    """What is scaled: the number of the endpoint's instances."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/all",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def _with_name(key: str, spec: Spec, content: dict[str, Any]) -> dict[str, Any]:
    """Parameters with a name before them that ends in their digest."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {key: f"{spec.resource}-{digest[:12]}", **content}


def _bring_up(client: Any, endpoint: Request, say: Callable[[str], None]) -> bool:
    """Make the endpoint, or move the one that is there; True when it was made here."""
    found = _describe(client, endpoint)
    if found and found["EndpointStatus"] == "Failed":
        say(f"deleting {endpoint}, which failed: {found.get('FailureReason')}")
        _send(client, endpoint.undo())
        with _failures():
            client.get_waiter("endpoint_deleted").wait(**endpoint.identity)
        found = None
    if found is None:
        _send(client, endpoint)
        say(f"made {endpoint}; it takes minutes to start")
        return True
    if found["EndpointConfigName"] != endpoint.parameters["EndpointConfigName"]:
        _wait(client, endpoint)  # one that is being changed cannot be changed
        _send(client, Request("sagemaker", "update_endpoint", endpoint.parameters))
        say(f"moving {endpoint} to what is asked for now")
    else:
        say(f"{endpoint} is there: {found['EndpointStatus']}")
    return False


def _wait(client: Any, endpoint: Request) -> None:
    polls = {"Delay": POLL_SECONDS, "MaxAttempts": MAX_POLLS}
    try:
        with _failures():
            waiter = client.get_waiter("endpoint_in_service")
            waiter.wait(**endpoint.identity, WaiterConfig=polls)
    except DeployFailed as error:
        found = _describe(client, endpoint) or {}
        why = found.get("FailureReason") or error
        raise DeployFailed(f"{endpoint} did not come into service: {why}") from error


def _undo_all(region: str, made: list[Request]) -> str:
    """Delete what was made, newest first; says what was deleted and what could not be."""
    if not made:
        return "nothing had been made"
    deleted, left = list[str](), list[str]()
    for each in reversed(made):
        try:
            _send(_client(each.service, region), each.undo())
            deleted.append(str(each))
        except DeployFailed as error:
            left.append(f"{each} ({error})")
    parts = list[str]()
    if deleted:
        parts.append(f"deleted {', '.join(deleted)}")
    if left:
        parts.append(f"NOT deleted: {', '.join(left)}")
    return "; ".join(parts)


def _describe(client: Any, made: Request) -> dict[str, Any] | None:
    """What is there by that name; None when nothing is."""
    try:
        return _send(client, Request(made.service, f"describe_{made.kind}", made.identity))
    except DeployFailed as error:
        if "Could not find" in str(error):  # its code is that of any bad request
            return None
        raise


def _send(client: Any, request: Request) -> dict[str, Any]:
    with _failures():
        return dict(getattr(client, request.operation)(**request.parameters) or {})


@contextmanager
def _failures() -> Iterator[None]:
    """Raise DeployFailed where AWS refuses, fails or cannot be reached. It names the permission
    that is missing, where one is."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        said = first_line(error)
        missing = re.search(r"not authorized to perform: (\S+)", said)
        if missing:
            said = f"the permission {missing[1]} is missing ({said})"
        raise DeployFailed(said) from error


def _client(service: str, region: str) -> Any:
    try:
        import boto3  # noqa: PLC0415
    except ImportError as error:
        raise InputError("SageMaker needs boto3: pip install 'peagle[deploy]'") from error
    return boto3.client(service, region_name=region)
