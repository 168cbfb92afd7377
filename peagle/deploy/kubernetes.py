"""Kubernetes: the manifests of a deployment, and kubectl, which applies them."""

import secrets
import shutil
import subprocess
from dataclasses import dataclass

from peagle.deploy.render import render
from peagle.deploy.spec import DeployFailed, Spec, image_for
from peagle.errors import InputError, first_line

PORT = 8000
VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"
KINDS = "deployment,service,hpa,secret,pvc"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Namespace, image, context and number of replicas; checked."""

    namespace: str = "default"
    image: str | None = None  # None: vLLM's own
    context: str | None = None  # kubectl's
    replicas: int = 1
    max_replicas: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.max_replicas:
            why = f"must be between 1 and `max_replicas` ({self.max_replicas})"
            raise InputError(why, field="replicas", value=self.replicas)


def dry_run(spec: Spec, cluster: Cluster) -> str:
    """All manifests but the Secret as YAML, in the order in which they are applied. Raises
    InputError for an engine without a published image."""
    image = image_for(spec, cluster.image, VLLM_IMAGE)
    return render("kubernetes.yaml.j2", spec=spec, cluster=cluster, image=image, port=PORT)


def secret(spec: Spec, cluster: Cluster) -> str:
    """The manifest of the Secret, with a new API key."""
    return render(
        "secret.yaml.j2", spec=spec, cluster=cluster, key=f"sk-{secrets.token_urlsafe(32)}"
    )


def apply(spec: Spec, cluster: Cluster) -> str:
    """Apply every manifest; the Secret only if it is missing. Returns kubectl's output."""
    manifests = dry_run(spec, cluster)
    name = f"{spec.resource}-api-key"
    found = _kubectl(cluster, "get", "secret", name, "--ignore-not-found", "-o", "name")
    output = ""
    if not found.strip():
        output = _kubectl(cluster, "apply", "-f", "-", given=secret(spec, cluster))
    return output + _kubectl(cluster, "apply", "-f", "-", given=manifests)


def status(resource: str, cluster: Cluster) -> str:
    """Deployment, autoscaler and pods as kubectl lists them."""
    found = _kubectl(cluster, "get", "deployment,hpa,pod", "-l", _selector(resource))
    return found or _nothing(resource, cluster)


def logs(resource: str, cluster: Cluster, lines: int) -> str:
    """The last lines of every replica."""
    return _kubectl(cluster, "logs", "-l", _selector(resource), "--prefix", f"--tail={lines}")


def delete(resource: str, cluster: Cluster) -> str:
    """Remove everything that `apply` makes, the volume with the weights and the key as well."""
    deleted = _kubectl(cluster, "delete", KINDS, "-l", _selector(resource))
    return deleted or _nothing(resource, cluster)


def _selector(resource: str) -> str:
    return f"app.kubernetes.io/name=peagle,app.kubernetes.io/instance={resource}"


def _nothing(resource: str, cluster: Cluster) -> str:
    return f"nothing called {resource} in namespace {cluster.namespace}\n"


def _kubectl(cluster: Cluster, *arguments: str, given: str | None = None) -> str:
    program = shutil.which("kubectl")
    if program is None:
        fix = "install it, or apply the output of `dry_run`"
        raise InputError("kubectl is not on the PATH", fix=fix)
    context = ["--context", cluster.context] if cluster.context else []
    command = [program, *context, "--namespace", cluster.namespace, *arguments]
    run = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        why = first_line(RuntimeError(run.stderr))
        raise DeployFailed(f"kubectl {arguments[0]} ended with code {run.returncode}: {why}")
    return run.stdout
