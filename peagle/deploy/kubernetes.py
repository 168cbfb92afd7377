"""Kubernetes: the manifests of a deployment, and kubectl, which brings them there."""

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import yaml

from peagle.deploy.spec import NO_IMAGE, DeployFailed, Spec, new_key
from peagle.errors import InputError, first_line

PORT = 8000
VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"
USER = 1000
CACHE = "/cache"  # weights and compiled kernels: the volume
WAITING = 5  # requests in the queue of each replica above which another one is started
KINDS = "deployment,service,hpa,secret,pvc"
HEAD_OF_DRY_RUN = """\
# The Secret {name}, with a generated key under `api-key`,
# is made by `peagle deploy` when it is not there; before `kubectl apply` of this make it yourself.
# A Secret hf-token with the key `token` is used, when there is one, for gated models.
# The autoscaler reads vllm_num_requests_waiting of each pod: give prometheus-adapter a rule that
# names vllm:num_requests_waiting so.
"""
NATIVE = "# Prometheus must bring the API key to /metrics of our server, as every client.\n"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where, from which image, and how often; checked."""

    namespace: str = "default"
    image: str | None = None  # None: vLLM's own
    context: str | None = None  # kubectl's
    replicas: int = 1
    max_replicas: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.max_replicas:
            why = f"must be between 1 and --max-replicas ({self.max_replicas})"
            raise InputError(f"--replicas {self.replicas}: {why}")


def manifests(spec: Spec, cluster: Cluster) -> list[dict[str, Any]]:
    """All but the Secret, in the order in which they are applied."""
    kinds = (_volume, _service, _deployment, _autoscaler)
    return [kind(spec, cluster) for kind in kinds]


def dry_run(spec: Spec, cluster: Cluster) -> str:
    """What would be applied, as YAML."""
    head = HEAD_OF_DRY_RUN.format(name=_key_name(spec)) + NATIVE * (spec.engine == "native")
    return head + yaml.safe_dump_all(manifests(spec, cluster), sort_keys=False)


def apply(spec: Spec, cluster: Cluster) -> str:
    """Bring everything there; what is there already is changed to it. Returns what kubectl says."""
    said = []
    found = _kubectl(cluster, "get", "secret", _key_name(spec), "--ignore-not-found", "-o", "name")
    if not found.strip():
        said.append(
            _kubectl(cluster, "apply", "-f", "-", given=yaml.safe_dump(_key(spec, cluster)))
        )
    text = yaml.safe_dump_all(manifests(spec, cluster), sort_keys=False)
    said.append(_kubectl(cluster, "apply", "-f", "-", given=text))
    return "".join(said)


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


def _nothing(resource: str, cluster: Cluster) -> str:
    return f"nothing called {resource} in namespace {cluster.namespace}\n"


def _kubectl(cluster: Cluster, *arguments: str, given: str | None = None) -> str:
    program = shutil.which("kubectl")
    if program is None:
        raise InputError("kubectl is not on the PATH: install it, or apply what --dry-run prints")
    context = ["--context", cluster.context] if cluster.context else []
    command = [program, *context, "--namespace", cluster.namespace, *arguments]
    run = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        why = first_line(RuntimeError(run.stderr))
        raise DeployFailed(f"kubectl {arguments[0]} ended with code {run.returncode}: {why}")
    return run.stdout


def _labels(resource: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "peagle", "app.kubernetes.io/instance": resource}


def _selector(resource: str) -> str:
    return ",".join(f"{name}={value}" for name, value in _labels(resource).items())


def _object(api: str, kind: str, name: str, spec: Spec, cluster: Cluster) -> dict[str, Any]:
    labels = {**_labels(spec.resource), "app.kubernetes.io/managed-by": "peagle"}
    metadata = {"name": name, "namespace": cluster.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _key_name(spec: Spec) -> str:
    return f"{spec.resource}-api-key"


def _key(spec: Spec, cluster: Cluster) -> dict[str, Any]:
    secret = _object("v1", "Secret", _key_name(spec), spec, cluster)
    return {**secret, "type": "Opaque", "stringData": {"api-key": new_key()}}


def _volume(spec: Spec, cluster: Cluster) -> dict[str, Any]:
    """Weights. Replicas on several nodes share it, which not every storage class can do."""
    mode = "ReadWriteMany" if cluster.max_replicas > 1 else "ReadWriteOnce"
    size = "300Gi" if spec.gpus else "10Gi"
    claim = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    return {**_object("v1", "PersistentVolumeClaim", spec.resource, spec, cluster), "spec": claim}


def _service(spec: Spec, cluster: Cluster) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    service = {"type": "ClusterIP", "selector": _labels(spec.resource), "ports": ports}
    return {**_object("v1", "Service", spec.resource, spec, cluster), "spec": service}


def _deployment(spec: Spec, cluster: Cluster) -> dict[str, Any]:
    """Without `replicas`: those are the autoscaler's to set, at every later `apply` too."""
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT)}
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 120,  # running answers are finished
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, cluster)],
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": spec.resource}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        ],
    }
    if spec.gpus:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    deployment = {
        "selector": {"matchLabels": _labels(spec.resource)},
        # No GPU is kept free for a second replica beside the one that is replaced.
        "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": {
            "metadata": {"labels": _labels(spec.resource), "annotations": annotations},
            "spec": pod,
        },
    }
    return {
        **_object("apps/v1", "Deployment", spec.resource, spec, cluster),
        "spec": deployment,
    }


def _container(spec: Spec, cluster: Cluster) -> dict[str, Any]:
    if cluster.image is None and spec.engine == "native":
        raise InputError(f"--image is missing: {NO_IMAGE}")
    amounts = {"cpu": "4", "memory": "16Gi"}
    if spec.gpus:
        amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": str(spec.gpus)}
    health = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    return {
        "name": spec.engine,
        "image": cluster.image or VLLM_IMAGE,
        "command": spec.command("0.0.0.0", PORT),
        "env": _environment(spec),
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        # Weights are downloaded first: up to two hours.
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": 720},
        "readinessProbe": {**health, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**health, "periodSeconds": 20, "failureThreshold": 6},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "cache", "mountPath": CACHE},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def _environment(spec: Spec) -> list[dict[str, Any]]:
    """Keys from Secrets, and a home: the user has none, and no name, in the image."""
    plain = {"HOME": CACHE, "HF_HOME": f"{CACHE}/huggingface", "USER": "peagle", **spec.env}
    key = {"name": _key_name(spec), "key": "api-key"}
    token = {"name": "hf-token", "key": "token", "optional": True}
    return [
        {"name": spec.key_variable, "valueFrom": {"secretKeyRef": key}},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}},
        *({"name": name, "value": value} for name, value in plain.items()),
    ]


def _autoscaler(spec: Spec, cluster: Cluster) -> dict[str, Any]:
    waiting = {
        "metric": {"name": "vllm_num_requests_waiting"},  # our server's name for it, too
        "target": {"type": "AverageValue", "averageValue": str(WAITING)},
    }
    scaler = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.resource},
        "minReplicas": cluster.replicas,
        "maxReplicas": cluster.max_replicas,
        "metrics": [{"type": "Pods", "pods": waiting}],
        # A replica takes minutes to load: it is not given up for a short lull.
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 900}},
    }
    kind = "HorizontalPodAutoscaler"
    return {**_object("autoscaling/v2", kind, spec.resource, spec, cluster), "spec": scaler}
