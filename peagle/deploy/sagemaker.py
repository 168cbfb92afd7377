"""SageMaker: a model, an endpoint configuration and an endpoint that serves through AWS's container
of vLLM, or through an image of ours (`container.py`); boto3 is imported when it is called.

Models and configurations cannot be changed there, so their names carry a digest of what they say:
one that is found by its name is the one that is wanted. The endpoint keeps its name and is moved
from one configuration to the next.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peagle.deploy.account import Account
from peagle.deploy.spec import NO_IMAGE, DeployFailed, Spec
from peagle.errors import InputError, first_line

# AWS's vLLM container, as its documentation names it; a few regions have another account.
IMAGE = "763104351884.dkr.ecr.{region}.amazonaws.com/vllm:server-sagemaker-cuda-v1"
GPU_AMI = "al2-ami-sagemaker-inference-gpu-3-1"  # the drivers that image wants
VARIANT = "all"
SCALING, REGISTER = "application-autoscaling", "register_scalable_target"
CONCURRENT = 8.0  # requests on each instance at a time above which another one is started
STARTUP_SECONDS = 3600  # for download and compilation; SageMaker's own limit
WAIT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Request:
    """A call of an AWS service."""

    service: str
    operation: str
    parameters: dict[str, Any]


def requests(spec: Spec, account: Account) -> list[Request]:
    """All that is sent for a new endpoint, in order."""
    if spec.engine == "native" and account.image is None:
        raise InputError(f"--image is missing: {NO_IMAGE}")
    container = {
        "Image": account.image or IMAGE.format(region=account.region),
        "Environment": _environment(spec),
    }
    model = {"PrimaryContainer": container, "ExecutionRoleArn": account.role}
    model_name = f"{spec.resource}-{_digest(model)}"
    variant = {
        "VariantName": VARIANT,
        "ModelName": model_name,
        "InstanceType": account.instance_type,
        "InitialInstanceCount": account.replicas,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_SECONDS,
        "ModelDataDownloadTimeoutInSeconds": STARTUP_SECONDS,
        **({"InferenceAmiVersion": GPU_AMI} if spec.gpus else {}),
    }
    config = {"ProductionVariants": [variant]}
    config_name = f"{spec.resource}-{_digest(config)}"
    endpoint = {"EndpointName": spec.resource, "EndpointConfigName": config_name}
    return [
        Request("sagemaker", "create_model", {"ModelName": model_name, **model}),
        Request(
            "sagemaker", "create_endpoint_config", {"EndpointConfigName": config_name, **config}
        ),
        Request("sagemaker", "create_endpoint", endpoint),
        *_scaling(spec, account),
    ]


def dry_run(spec: Spec, account: Account) -> str:
    """What would be sent, as JSON."""
    sent = [
        {"service": each.service, "operation": each.operation, "parameters": each.parameters}
        for each in requests(spec, account)
    ]
    return json.dumps(sent, indent=1)


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
                _call(client, wanted)
                made.append(wanted)
                say(f"made {_name(wanted)}")
        if _bring_up(client, endpoint, say):
            made.append(endpoint)
        _wait(client, endpoint)
        for each in scaling:
            _call(_client(each.service, account.region), each)
            if endpoint in made and each.operation == REGISTER:
                made.append(each)
    except DeployFailed as error:
        left = _delete_all(account.region, made)
        raise DeployFailed(f"{error}; {left}") from error
    return str(endpoint.parameters["EndpointName"])


def status(endpoint: str, region: str) -> dict[str, Any]:
    """The endpoint's state, and why it failed where it did."""
    client = _client("sagemaker", region)
    found = _describe(client, Request("sagemaker", "create_endpoint", {"EndpointName": endpoint}))
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
    group = {"logGroupName": f"/aws/sagemaker/Endpoints/{endpoint}"}
    newest = {**group, "orderBy": "LastEventTime", "descending": True, "limit": 1}
    streams = _call(client, Request("logs", "describe_log_streams", newest))["logStreams"]
    if not streams:
        return []
    asked = {**group, "logStreamName": streams[0]["logStreamName"], "limit": lines}
    return [
        event["message"]
        for event in _call(client, Request("logs", "get_log_events", asked))["events"]
    ]


def delete(endpoint: str, region: str) -> list[str]:
    """Delete the endpoint and every configuration and model made for it; returns their names."""
    client = _client("sagemaker", region)
    running = Request("sagemaker", "create_endpoint", {"EndpointName": endpoint})
    found = [
        *([running] if _describe(client, running) else []),
        *_made_for(client, endpoint, "endpoint_config"),
        *_made_for(client, endpoint, "model"),
    ]
    scaling, variant = _client(SCALING, region), _variant(endpoint)
    named = {"ServiceNamespace": "sagemaker", "ResourceIds": [variant["ResourceId"]]}
    if _call(scaling, Request(SCALING, "describe_scalable_targets", named))["ScalableTargets"]:
        _call(scaling, Request(SCALING, "deregister_scalable_target", variant))
    for each in found:
        _call(client, _deletion(each))
    return [_name(each) for each in found]


def _made_for(client: Any, endpoint: str, kind: str) -> list[Request]:
    """Models or configurations made for an endpoint. Names that begin alike may be another
    endpoint's: ours end in a digest."""
    items = "".join(word.capitalize() for word in kind.split("_"))
    pages = client.get_paginator(f"list_{kind}s").paginate(NameContains=endpoint)
    listed = _guarded(pages.build_full_result)[f"{items}s"]
    ours = re.compile(re.escape(endpoint) + r"-[0-9a-f]{12}")
    names = [item[f"{items}Name"] for item in listed]
    return [
        Request("sagemaker", f"create_{kind}", {f"{items}Name": name})
        for name in names
        if ours.fullmatch(name)
    ]


def _environment(spec: Spec) -> dict[str, str]:
    """AWS's container makes --a-b VALUE of SM_VLLM_A_B, a bare --a-b of the value true; so does
    ours, for the options that our engine has."""
    given = {"model": spec.model, "served-model-name": spec.name, **spec.vllm_settings()}
    ours = {"PEAGLE_ENGINE": "native"} if spec.engine == "native" else {}
    drafting = {"model": spec.head, "num_speculative_tokens": spec.k}
    told = {name: value for name, value in drafting.items() if value is not None}
    if ours and told:
        given["speculative-config"] = json.dumps(told)
    options = {"SM_VLLM_" + name.upper().replace("-", "_"): given[name] for name in given}
    return {**options, **ours, **spec.env}


def _scaling(spec: Spec, account: Account) -> list[Request]:
    if account.max_replicas is None:
        return []
    variant = _variant(spec.resource)
    limits = {"MinCapacity": account.replicas, "MaxCapacity": account.max_replicas}
    metric = {"PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"}
    policy = {
        "PolicyName": spec.resource,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": CONCURRENT,
            "PredefinedMetricSpecification": metric,
        },
    }
    return [
        Request(SCALING, REGISTER, {**variant, **limits}),
        Request(SCALING, "put_scaling_policy", {**variant, **policy}),
    ]


def _variant(endpoint: str) -> dict[str, str]:
    """What is scaled: the number of the endpoint's instances."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _bring_up(client: Any, endpoint: Request, say: Callable[[str], None]) -> bool:
    """Make the endpoint, or move the one that is there; True when it was made here."""
    found = _describe(client, endpoint)
    if found and found["EndpointStatus"] == "Failed":
        say(f"deleting {_name(endpoint)}, which failed: {found.get('FailureReason')}")
        _call(client, _deletion(endpoint))
        waiter = client.get_waiter("endpoint_deleted")
        _guarded(lambda: waiter.wait(EndpointName=endpoint.parameters["EndpointName"]))
        found = None
    if found is None:
        _call(client, endpoint)
        say(f"made {_name(endpoint)}; it takes minutes to start")
        return True
    if found["EndpointConfigName"] != endpoint.parameters["EndpointConfigName"]:
        _wait(client, endpoint)  # one that is being changed cannot be changed
        _call(client, Request("sagemaker", "update_endpoint", endpoint.parameters))
        say(f"moving {_name(endpoint)} to what is asked for now")
    else:
        say(f"{_name(endpoint)} is there: {found['EndpointStatus']}")
    return False


def _wait(client: Any, endpoint: Request) -> None:
    waiter, name = client.get_waiter("endpoint_in_service"), endpoint.parameters["EndpointName"]
    config = {"Delay": WAIT_SECONDS, "MaxAttempts": 2 * STARTUP_SECONDS // WAIT_SECONDS}
    try:
        _guarded(lambda: waiter.wait(EndpointName=name, WaiterConfig=config))
    except DeployFailed as error:
        found = _describe(client, endpoint) or {}
        why = found.get("FailureReason") or error
        raise DeployFailed(f"endpoint {name} did not come into service: {why}") from error


def _delete_all(region: str, made: list[Request]) -> str:
    """Undo, newest first; says what was deleted and what could not be."""
    if not made:
        return "nothing had been made"
    deleted, left = [], []
    for each in reversed(made):
        try:
            _call(_client(each.service, region), _deletion(each))
            deleted.append(_name(each))
        except DeployFailed as error:
            left.append(f"{_name(each)} ({error})")
    parts = [f"deleted {', '.join(deleted)}"] if deleted else []
    return "; ".join([*parts, *([f"NOT deleted: {', '.join(left)}"] if left else [])])


def _deletion(made: Request) -> Request:
    if made.operation == REGISTER:
        variant = {name: made.parameters[name] for name in _variant("")}
        return Request(SCALING, "deregister_scalable_target", variant)
    kind = made.operation.removeprefix("create_")
    key = next(iter(made.parameters))
    return Request("sagemaker", f"delete_{kind}", {key: made.parameters[key]})


def _name(made: Request) -> str:
    """As people say: "model peagle-x-0123"."""
    if made.operation == REGISTER:
        return f"scaling of {made.parameters['ResourceId']}"
    kind = made.operation.removeprefix("create_").replace("_", " ")
    return f"{kind} {next(iter(made.parameters.values()))}"


def _describe(client: Any, made: Request) -> dict[str, Any] | None:
    """What is there by that name; None when nothing is."""
    from botocore.exceptions import ClientError  # noqa: PLC0415

    kind, key = made.operation.removeprefix("create_"), next(iter(made.parameters))
    try:
        return dict(getattr(client, f"describe_{kind}")(**{key: made.parameters[key]}))
    except ClientError as error:
        if "Could not find" in str(error):  # its code is that of any bad request
            return None
        raise _failure(error) from error


def _call(client: Any, request: Request) -> dict[str, Any]:
    return dict(_guarded(lambda: getattr(client, request.operation)(**request.parameters)) or {})


def _guarded(call: Callable[[], Any]) -> Any:
    """The call's answer; DeployFailed when AWS refuses, fails or cannot be reached."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        return call()
    except (BotoCoreError, ClientError) as error:
        raise _failure(error) from error


def _failure(error: Exception) -> DeployFailed:
    """Names the permission that is missing, where one is."""
    said = first_line(error)
    missing = re.search(r"not authorized to perform: (\S+)", said)
    if missing:
        return DeployFailed(f"the permission {missing[1]} is missing ({said})")
    return DeployFailed(said)


def _client(service: str, region: str) -> Any:
    try:
        import boto3  # noqa: PLC0415
    except ImportError as error:
        raise InputError("SageMaker needs boto3: pip install 'peagle[deploy]'") from error
    return boto3.client(service, region_name=region)
