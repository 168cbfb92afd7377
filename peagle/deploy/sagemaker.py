"""SageMaker: an endpoint and all that it needs as one CloudFormation stack, through boto3.

The template, templates/sagemaker.yaml.j2, names no account and fits every region. CloudFormation
creates, updates, rolls back and deletes; this module hands it the template and waits.
"""

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from peagle.deploy.cloudformation import Stack, client_of, failures
from peagle.deploy.facts import facts
from peagle.deploy.plan import DeployFailed, Plan, check_replicas
from peagle.deploy.render import render
from peagle.errors import InputError, first_line

LOG_SECONDS = 3 * 3600
VOCABULARY = "o200k_base.tiktoken"  # GPT-OSS's, which vLLM else fetches from the internet
SCALING = ("ScalableTarget", "ScalingPolicy")  # resources of the template

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Account:
    """Rights, network and size of a deployment.

    region: AWS region; a template needs none.
    replicas: Number of replicas (on SageMaker: instances); the minimum if they are scaled.
    max_replicas: Maximum number of replicas: above `replicas`, more are started for waiting
        requests. Default: `replicas`.
    SageMaker:
    role: ARN of the execution role. Default: one that is made with the endpoint.
    weights: Folder on S3 with the target's files, s3://BUCKET/FOLDER. Default: from the hub, at
        every start of an instance.
    subnets: ID of a subnet for the instances; repeat the option for several. Default: no VPC.
    security_groups: ID of a security group for the instances; repeat the option for several.
    kms_key: ARN of a KMS key for the instances' volumes and the weights. Default: AWS's own.
    token_secret: Name of the secret in Secrets Manager that is the hub's token, for gated models.
    """

    region: str | None = None
    replicas: int = 1
    max_replicas: int | None = None
    role: str | None = None
    weights: str | None = None
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str | None = None
    token_secret: str | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not re.fullmatch("s3://[^/]+/.+", self.weights):
            why, fix = "is no folder on S3", "give s3://BUCKET/FOLDER/"
            raise InputError(why, field="weights", value=self.weights, fix=fix)
        check_replicas(self.replicas, self.max_replicas)


def template(plan: Plan, account: Account) -> str:
    """The stack's template, in YAML. Raises InputError for an image or a head that SageMaker cannot
    fetch."""
    image, head = str(plan.image), plan.head or ""
    aws_images = [each.name for each in facts().images if each.place == "sagemaker"]
    registries = facts().registries if image in aws_images else {}
    if registries and account.region not in (None, *registries):
        why, fix = "AWS publishes no image of vLLM there", "choose another, or `image`"
        raise InputError(why, field="region", value=account.region, fix=fix)
    if not registries and ".dkr.ecr." not in image:
        why, fix = "SageMaker takes images from ECR only", "push it there"
        raise InputError(why, field="image", value=image, fix=fix)
    # CloudFormation's models have one folder from S3 (no AdditionalModelDataSources in its schema
    # of 2026-10-20), so a head on S3 is that folder or lies in the target's.
    weights = account.weights and account.weights.rstrip("/") + "/"
    if weights and head.startswith("s3://") and not head.startswith(weights):
        why, fix = "SageMaker copies one folder, the target's", f"copy it to {weights}head/"
        raise InputError(why, field="head", value=head, fix=fix)
    values = {"plan": plan, "account": account, "registries": registries}
    return render("sagemaker.yaml.j2", shell=shlex.join, **values)


@failures()
def apply(plan: Plan, account: Account, report: Report) -> None:
    """Create the stack, or update it, and wait for the endpoint. A creation that fails leaves
    nothing; an update that fails is rolled back."""
    body = template(plan, account)
    _check_weights(plan, account)
    stack = Stack(client_of("cloudformation", account.region), plan.resource, report)
    there = stack.identity()
    if there is None or stack.rest(there) == "DELETE_COMPLETE":  # of a change that still ran
        stack.change("create", body, OnFailure="DELETE")
        return
    former = yaml.safe_load(stack.client.get_template(StackName=stack.name)["TemplateBody"])
    resources = former["Resources"]
    [variant] = resources["EndpointConfig"]["Properties"]["ProductionVariants"]
    moves = variant["InstanceType"] != plan.instance_type and SCALING[0] in resources
    if moves:  # AWS refuses another type of instance while their number is scaled
        fixed = {name: each for name, each in resources.items() if name not in SCALING}
        stack.change("update", yaml.safe_dump({**former, "Resources": fixed}))
    try:
        stack.change("update", body)
    except DeployFailed:
        if moves:
            stack.change("update", yaml.safe_dump(former))
        raise


@failures()
def status(resource: str, region: str) -> dict[str, Any]:
    """The state of the endpoint, and the reason of a failure."""
    found = client_of("sagemaker", region).describe_endpoint(EndpointName=resource)
    variants = found.get("ProductionVariants", [])
    return {
        "endpoint": resource,
        "status": found["EndpointStatus"],
        "instances": sum(variant.get("CurrentInstanceCount", 0) for variant in variants),
        "failure": found.get("FailureReason"),
    }


@failures()
def logs(resource: str, region: str, lines: int) -> list[str]:
    """The last lines that the containers wrote to CloudWatch, of the last hours."""
    pages = client_of("logs", region).get_paginator("filter_log_events")
    since = int((time.time() - LOG_SECONDS) * 1000)
    group = f"/aws/sagemaker/Endpoints/{resource}"
    events = pages.paginate(logGroupName=group, startTime=since).build_full_result()["events"]
    return [event["message"] for event in events[-lines:]]


@failures()
def delete(resource: str, region: str, report: Report) -> None:
    """Delete the stack and wait: nothing of it is left but the log."""
    stack = Stack(client_of("cloudformation", region), resource, report)
    if stack.identity() is None:
        raise InputError(f"no stack {resource} in {region}")
    stack.change("delete")


def invoke(resource: str, region: str, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The endpoint's answer to a request of OpenAI's API, part by part as it comes."""
    with failures():
        answer = client_of("sagemaker-runtime", region).invoke_endpoint_with_response_stream(
            EndpointName=resource, ContentType="application/json", Body=json.dumps(body)
        )
        for event in answer["Body"]:
            yield event["PayloadPart"]["Bytes"]


def _check_weights(plan: Plan, account: Account) -> None:
    """Look for the target's files on S3: without them SageMaker fails an hour later."""
    if account.weights is None:
        return
    bucket, _, folder = account.weights.removeprefix("s3://").rstrip("/").partition("/")
    needed = ["config.json"]
    if "gpt-oss" in plan.model.lower():
        needed.append(VOCABULARY)
    client = client_of("s3", account.region)
    for name in needed:
        try:
            client.head_object(Bucket=bucket, Key=f"{folder}/{name}")
        except client.exceptions.ClientError as error:
            why = f"its {name} cannot be read ({first_line(error)})"
            fix = "copy it there, or allow s3:GetObject"
            raise InputError(why, field="weights", value=account.weights, fix=fix) from error
