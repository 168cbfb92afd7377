"""CloudFormation: change a stack, wait, and report the cause of a failure. boto3 is imported when
it is needed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peagle.deploy.plan import DeployFailed
from peagle.errors import InputError, first_line

POLL_SECONDS = 15


@contextmanager
def failures() -> Iterator[None]:
    """Raise DeployFailed where AWS refuses, fails or cannot be reached."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
    except ImportError as error:
        fix = "pip install 'peagle[deploy]'"
        raise InputError("SageMaker needs boto3", fix=fix) from error
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise DeployFailed(first_line(error)) from error


def client_of(service: str, region: str | None) -> Any:
    import boto3  # noqa: PLC0415

    return boto3.client(service, region_name=region)


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of CloudFormation."""

    client: Any
    name: str
    report: Callable[[str], None]

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
