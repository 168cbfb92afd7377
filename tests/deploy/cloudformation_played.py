"""CloudFormation as moto has it, and what moto lacks of it.

A change whose resource fails is undone, as CloudFormation's guide says; resources have events; the
same template again is refused. AWS's rule for scaled endpoints is kept, too. moto knows neither
alarms nor scaling in stacks: test_sagemaker.py gives those to their own services.
"""

import json
from typing import Any

import boto3
import yaml
from botocore.exceptions import ClientError
from moto.cloudformation.models import Event, Stack, cloudformation_backends

ACCOUNT, REGION = "123456789012", "us-west-2"
SCALED = "the instance type cannot change while the variant is a scalable target"


class CloudFormation:
    """A client. `broken`: the reason of each resource that fails, by its name in the template."""

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}
        self.asked: list[str] = []
        self._inner = boto3.client("cloudformation", region_name=REGION)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_stack(self, *, OnFailure: str = "ROLLBACK", **given: Any) -> Any:
        self.asked.append("create")
        answer = self._inner.create_stack(**given)
        stack = self.stack(answer["StackId"])
        # moto makes what an output names when it is first described, even of a deleted stack.
        self._inner.describe_stacks(StackName=stack.stack_id)
        if self._fails(stack, "CREATE"):
            assert OnFailure in ("DELETE", "ROLLBACK", "DO_NOTHING")
            if OnFailure == "DELETE":
                self._inner.delete_stack(StackName=stack.stack_id)
            else:
                stack.status = "CREATE_FAILED" if OnFailure == "DO_NOTHING" else "ROLLBACK_COMPLETE"
        return answer

    def update_stack(self, **given: Any) -> Any:
        self.asked.append("update")
        stack = self.stack(given["StackName"])
        former, new = str(stack.template), given["TemplateBody"]
        if content(new) == content(former):
            message = "No updates are to be performed."
            error = {"Code": "ValidationError", "Message": message}
            raise ClientError({"Error": error}, "UpdateStack")
        scaled = "ScalableTarget" in content(former)["Resources"]
        moved = kind(former) != kind(new)
        answer = self._inner.update_stack(**given)
        if self._fails(stack, "UPDATE", {"Endpoint": SCALED} if scaled and moved else {}):
            self._inner.update_stack(**{**given, "TemplateBody": former})
            del stack.events[-2:]  # moto's, of a change that a user began
            stack.status = "UPDATE_ROLLBACK_COMPLETE"
        return answer

    def delete_stack(self, **given: Any) -> Any:
        self.asked.append("delete")
        return self._inner.delete_stack(**given)

    def stack(self, name: str) -> Stack:
        return cloudformation_backends[ACCOUNT][REGION].get_stack(name)

    def template(self, name: str) -> Any:
        return content(str(self.stack(name).template))

    def _fails(self, stack: Stack, verb: str, rules: dict[str, str] | None = None) -> bool:
        """Note the events of all resources; whether one failed."""
        template = str(stack.template)
        reasons = {**self.broken, **(rules or {})}
        names = content(template)["Resources"]
        for name in names:
            self._note(stack, name, f"{verb}_IN_PROGRESS", "")
        if not reasons:
            for name in names:
                self._note(stack, name, f"{verb}_COMPLETE", "")
        for name, reason in reasons.items():
            self._note(stack, name, f"{verb}_FAILED", reason)
            self._note(stack, "FirstToken", f"{verb}_FAILED", "Resource creation cancelled")
        return bool(reasons)

    def _note(self, stack: Stack, name: str, status: str, reason: str) -> None:
        event = Event(stack.stack_id, stack.name, name, "", "", status, reason, None)
        stack.events.append(event)


def content(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else yaml.safe_load(text)


def kind(template: str) -> str:
    """The instance type of a template's endpoint."""
    properties = content(template)["Resources"]["EndpointConfig"]["Properties"]
    [variant] = properties["ProductionVariants"]
    return str(variant["InstanceType"])
