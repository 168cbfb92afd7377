"""SageMaker: an endpoint and all that it needs as one stack of CloudFormation, through boto3, which
is imported when it is needed.

The template, templates/sagemaker.yaml.j2, names no account and fits every region. CloudFormation
creates, updates, rolls back and deletes; this module hands it the template and waits.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peagle.deploy.data import facts, render
from peagle.deploy.plan import DeployFailed, Plan
from peagle.errors import InputError, first_line

POLL_SECONDS = 15

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Account:
    """Rights, network and weights of a deployment.

    SageMaker:
    role: ARN of the execution role. Default: one that is made with the endpoint.
    weights: Folder on S3 with the target's files, s3://BUCKET/FOLDER. Default: from the hub, at
        every start of an instance.
    subnets: ID of a subnet for the instances; repeat the option for several. Default: no VPC.
    security_groups: ID of a security group for the instances; repeat the option for several.
    kms_key: ARN of a KMS key for the instances' volumes and the weights. Default: AWS's own.
    token_secret: Name of the secret in Secrets Manager that is the hub's token, for gated models.
    """

    role: str | None = None
    weights: str | None = None
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key: str | None = None
    token_secret: str | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not re.fullmatch("s3://[^/]+/.+", self.weights):
            fix = "give s3://BUCKET/FOLDER/"
            raise InputError("is no folder on S3", field="weights", value=self.weights, fix=fix)
        if bool(self.subnets) != bool(self.security_groups):
            why = "subnets and security groups go together"
            fix = "give both or neither"
            raise InputError(why, field="subnets", value=list(self.subnets), fix=fix)


def template(plan: Plan, account: Account, region: str | None = None) -> str:
    """The stack's template, in YAML, the same for every region. Raises InputError for an image or a
    head that SageMaker cannot fetch; in `region` alone, where one is named."""
    head = plan.head or ""
    aws_images = [each.name for each in facts().images if each.place == "sagemaker"]
    registries = facts().registries if plan.image in aws_images else {}
    if registries and region not in (None, *registries):
        why = "AWS publishes no image of vLLM there"
        fix = "choose another, or `image`"
        raise InputError(why, field="region", value=region, fix=fix)
    if not registries and ".dkr.ecr." not in plan.image:
        why = "SageMaker takes images from ECR only"
        raise InputError(why, field="image", value=plan.image, fix="push it there")
    # CloudFormation's models have one folder from S3 (no AdditionalModelDataSources in its schema
    # of 2026-10-20), so a head on S3 is that folder or lies in the target's.
    weights = account.weights and account.weights.rstrip("/") + "/"
    if weights and head.startswith("s3://") and not head.startswith(weights):
        why = "SageMaker copies one folder, the target's"
        raise InputError(why, field="head", value=head, fix=f"copy it to {weights}head/")
    return render("sagemaker.yaml.j2", plan=plan, account=account, registries=registries)


@contextmanager
def failures() -> Iterator[None]:
    """Raise DeployFailed where AWS refuses, fails or cannot be reached."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
    except ImportError as error:
        raise InputError("SageMaker needs boto3", fix="pip install 'peagle[deploy]'") from error
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise DeployFailed(first_line(error)) from error


def client_of(service: str, region: str) -> Any:
    import boto3  # noqa: PLC0415

    return boto3.client(service, region_name=region)


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of CloudFormation."""

    client: Any
    name: str
    report: Report

    def identity(self) -> str | None:
        """Its id, if it is there."""
        try:
            return str(self.client.describe_stacks(StackName=self.name)["Stacks"][0]["StackId"])
        except self.client.exceptions.ClientError as error:
            if "does not exist" not in str(error):  # its code is that of any bad request
                raise
            return None

    def change(self, verb: str, body: str | None = None, **parameters: Any) -> None:
        """Create, update or delete, and wait. Raises DeployFailed with the reason of the resource
        that failed first."""
        if body is not None:
            parameters |= {"TemplateBody": body, "Capabilities": ["CAPABILITY_IAM"]}
        before = self.identity()
        try:
            answer = getattr(self.client, f"{verb}_stack")(StackName=self.name, **parameters)
        except self.client.exceptions.ClientError as error:
            if "No updates are to be performed" not in str(error):
                raise
            self.report("nothing has changed")
            return
        stack = before or answer["StackId"]
        state = self.rest(stack)
        if state != f"{verb.upper()}_COMPLETE":
            left = "nothing of it is left" if state == "DELETE_COMPLETE" else f"now {state}"
            raise DeployFailed(f"{self._reason(stack, verb)}; the stack {self.name}: {left}")

    def rest(self, stack: str) -> str:
        """Wait until nothing changes, reporting the newest event each time; the state then."""
        last = ""
        while True:
            [found] = self.client.describe_stacks(StackName=stack)["Stacks"]
            newest = self._events(stack)[0]
            line = f"{newest['LogicalResourceId']}: {newest['ResourceStatus']}"
            if line != last:
                self.report(line)
            state = str(found["StackStatus"])
            if not state.endswith("_IN_PROGRESS") or state.startswith("REVIEW"):
                return state
            last = line
            time.sleep(POLL_SECONDS)

    def _reason(self, stack: str, verb: str) -> str:
        """The reason of the first failure since the newest change of this kind began."""
        reason = ""
        for event in self._events(stack):
            text = event.get("ResourceStatusReason", "")
            if event["ResourceStatus"].endswith("_FAILED"):
                reason = f"{event['LogicalResourceId']}: {' '.join(text.split())}"
            if (event["ResourceStatus"], text) == (f"{verb.upper()}_IN_PROGRESS", "User Initiated"):
                break
        return reason

    def _events(self, stack: str) -> list[dict[str, Any]]:
        """The newest events, the newest first."""
        return list(self.client.describe_stack_events(StackName=stack)["StackEvents"])


@failures()
def apply(plan: Plan, account: Account, region: str, report: Report) -> None:
    """Create the stack, or update it, and wait for the endpoint. A creation that fails leaves
    nothing; an update that fails is rolled back."""
    body = template(plan, account, region)
    _check_weights(plan, account, region)
    stack = Stack(client_of("cloudformation", region), plan.resource, report)
    there = stack.identity()
    state = there and stack.rest(there)
    if state in (None, "DELETE_COMPLETE"):  # the latter: a creation that still ran has failed
        stack.change("create", body, OnFailure="DELETE")
        return
    if state == "ROLLBACK_COMPLETE" or state.endswith("_FAILED"):
        why = f"{plan.resource} failed half-way, and AWS does not update it"
        fix = "`peagle deploy delete` it first"
        if state == "UPDATE_ROLLBACK_FAILED":  # its endpoint still answers
            command = "aws cloudformation continue-update-rollback --stack-name"
            fix = f"`{command} {plan.resource}` first"
        raise InputError(why, field="stack", value=state, fix=fix)
    stack.change("update", body)


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


def _check_weights(plan: Plan, account: Account, region: str) -> None:
    """Look for the target's files on S3: without them SageMaker fails an hour later."""
    if account.weights is None:
        return
    bucket, _, folder = account.weights.removeprefix("s3://").rstrip("/").partition("/")
    needed = ["config.json"]
    if "gpt-oss" in plan.model.lower():
        needed.append("o200k_base.tiktoken")  # which vLLM else fetches from the internet
    client = client_of("s3", region)
    for name in needed:
        try:
            client.head_object(Bucket=bucket, Key=f"{folder}/{name}")
        except client.exceptions.ClientError as error:
            why = f"its {name} cannot be read ({first_line(error)})"
            fix = "copy it there, or allow s3:GetObject"
            raise InputError(why, field="weights", value=account.weights, fix=fix) from error
