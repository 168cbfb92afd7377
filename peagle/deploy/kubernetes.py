"""Kubernetes: a deployment in the words of vLLM's production-stack chart, of KServe, or as plain
manifests, and the commands of helm and kubectl that apply and manage it. Nothing is managed here.
"""

import hashlib
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from peagle.catalog import flag_options
from peagle.deploy.facts import facts, version
from peagle.deploy.plan import Plan
from peagle.deploy.render import render
from peagle.errors import InputError

CHART = "vllm-stack --repo https://vllm-project.github.io/production-stack --version 0.1.12"
KINDS = "deployment,service,networkpolicy"
PODS = "kubectl -n {namespace} {verb} -l app.kubernetes.io/instance={name}"
OF_KSERVE = "kubectl -n {namespace} {verb} -l app.kubernetes.io/name={name}"
APPLY = "kubectl apply -f {file}"
LOGS = "logs --prefix --tail={lines}"
# Commands by form and by what they do.
COMMANDS = {
    "stack": {
        "start": f"helm upgrade --install {{name}} {CHART} -n {{namespace}} -f {{file}}",
        "status": PODS.replace("{verb}", "get deployment,pod"),
        "logs": PODS.replace("{verb}", LOGS),
        "delete": "helm uninstall {name} -n {namespace}",
        "forward": "kubectl -n {namespace} port-forward service/{name}-router-service 8000:80",
    },
    "kserve": {
        "start": APPLY,
        "status": "kubectl -n {namespace} get llminferenceservice {name}",
        "logs": OF_KSERVE.replace("{verb}", LOGS),
        "delete": "kubectl -n {namespace} delete llminferenceservice {name}",
        "forward": "kubectl -n {namespace} port-forward service/{name}-kserve-workload-svc 8000",
    },
    "manifests": {
        "start": APPLY,
        "status": PODS.replace("{verb}", "get deployment,pod"),
        "logs": PODS.replace("{verb}", LOGS),
        "delete": PODS.replace("{verb}", f"delete {KINDS}"),
        "forward": "kubectl -n {namespace} port-forward service/{name} 8000:80",
    },
}
SHUTDOWN_SECONDS = {"stack": 25, "manifests": 100}  # KServe sets its own
# Options that a form says by a field of its own.
OWN_FIELDS = {
    "stack": {"tensor-parallel-size", "enable-prefix-caching"},
    "kserve": {"tensor-parallel-size", "served-model-name", "revision"},
    "manifests": set[str](),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Form, namespace and number of replicas."""

    form: str  # one of COMMANDS
    namespace: str = "default"
    replicas: int = 1
    max_replicas: int | None = None  # None: always `replicas`

    def __post_init__(self) -> None:
        if self.form not in COMMANDS:
            fix = f"choose one of {', '.join(COMMANDS)}"
            raise InputError("is unknown", field="form", value=self.form, fix=fix)
        if self.replicas < 1:
            raise InputError("must be at least 1", field="replicas", value=self.replicas)
        if self.max_replicas is None:
            return
        if self.form != "stack":
            why, fix = "only the stack is scaled", "leave it out, or scale by an object of your own"
            raise InputError(why, field="max_replicas", value=self.max_replicas, fix=fix)
        if self.max_replicas < self.replicas:
            why = f"must be at least `replicas` ({self.replicas})"
            raise InputError(why, field="max_replicas", value=self.max_replicas)


def rendered(plan: Plan, cluster: Cluster, *, pinned: bool) -> str:
    """The deployment as YAML, after the commands that it wants; `pinned`: on nodes with such a GPU
    only. Raises InputError for our engine in a form for vLLM."""
    if plan.engine == "native" and cluster.form != "manifests":
        why = f"runs vLLM only, and {plan.name} is served by the native engine"
        raise InputError(why, field="form", value=cluster.form, fix="choose manifests")
    labels = {"app.kubernetes.io/name": "peagle", "app.kubernetes.io/instance": plan.resource}
    metadata = {"name": plan.resource, "namespace": cluster.namespace, "labels": labels}
    arguments = _arguments(plan, cluster.form)
    repository, _, tag = str(plan.image).rpartition(":")
    where = ["--host", "0.0.0.0", "--port", "8000"]
    header = _header(plan, cluster)
    return header + render(
        f"{cluster.form}.yaml.j2",
        plan=plan,
        cluster=cluster,
        labels=labels,
        metadata=metadata,
        repository=repository,
        tag=tag,
        arguments=arguments,
        words=shlex.join(arguments),
        command=[*plan.program, plan.argv[0], *where, *arguments],
        unique=hashlib.sha256(f"{cluster.namespace}/{plan.resource}".encode()).hexdigest()[:5],
        environment=_environment(plan),
        prefix_caching=plan.options.get("enable-prefix-caching", True),
        pinned=_node_terms(plan) if pinned else [],
        scaled=cluster.max_replicas is not None,
        policy=[_network_policy(plan, cluster)],
    )


def command(verb: str, name: str, cluster: Cluster, **given: object) -> list[str]:
    """The command of helm or kubectl that does `verb` to a deployment."""
    text = COMMANDS[cluster.form][verb]
    return shlex.split(text.format(name=name, namespace=cluster.namespace, **given))


def run(line: list[str], given: str | None = None) -> int:
    """Run a command of helm or kubectl in the foreground; its exit code."""
    if shutil.which(line[0]) is None:
        fix = "install it, or use what `dry_run` prints"
        raise InputError(f"{line[0]} is not on the PATH", fix=fix)
    return subprocess.run(line, input=given, text=True, check=False).returncode


def _header(plan: Plan, cluster: Cluster) -> str:
    secret = f"{plan.resource}-api-key"
    key = '--from-literal=api-key="sk-$(openssl rand -hex 24)"'
    lines = [
        "Make the key once; a Secret hf-token with the key `token` is for gated models:",
        f"  kubectl -n {cluster.namespace} create secret generic {secret} {key}",
        f"Then: {shlex.join(command('start', plan.resource, cluster, file='FILE'))}",
    ]
    if plan.cuda:
        driver = 580 if version(plan.cuda) >= (13,) else 525
        lines.append(
            f"The image has CUDA {plan.cuda}: nodes need NVIDIA's driver {driver} or newer."
        )
    return "".join(f"# {line}\n" for line in lines)


def _arguments(plan: Plan, form: str) -> list[str]:
    """Options after the model, but for those that the form has fields for."""
    options = {name: value for name, value in plan.options.items() if name not in OWN_FIELDS[form]}
    seconds = SHUTDOWN_SECONDS.get(form)
    known = version(plan.vllm) >= version(facts().shutdown_timeout_since)
    if seconds and plan.engine == "vllm" and (plan.vllm is None or known):
        options["shutdown-timeout"] = seconds
    return flag_options(options)


def _environment(plan: Plan) -> list[dict[str, Any]]:
    token = {"name": "hf-token", "key": "token", "optional": True}
    named = [{"name": name, "value": value} for name, value in plan.env.items()]
    return [*named, {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}}]


def _node_terms(plan: Plan) -> list[dict[str, Any]]:
    """Nodes with the plan's type of GPU, by the labels of NVIDIA's GPU feature discovery."""
    if plan.gpu is None:
        return []
    gpu = facts().gpus[plan.gpu]
    major, minor = gpu.capability.split(".")
    exact = {"nvidia.com/gpu.compute.major": major, "nvidia.com/gpu.compute.minor": minor}
    terms = [{"key": key, "operator": "In", "values": [each]} for key, each in exact.items()]
    least = str(gpu.memory * 1024 * 9 // 10)  # MiB; drivers keep some
    return [*terms, {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [least]}]


def _network_policy(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Access to vLLM, whose key guards /v1 only: for the stack's router, else for the namespace's
    pods, and for Prometheus."""
    stack = cluster.form == "stack"
    instance = {"app.kubernetes.io/instance": plan.resource}
    engine = instance | {"app.kubernetes.io/component": "serving-engine"}
    router = {"matchLabels": instance | {"app.kubernetes.io/component": "router"}}
    prometheus = {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    allowed = [
        {"podSelector": router if stack else {}},
        {"namespaceSelector": {}, "podSelector": prometheus},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": plan.resource, "namespace": cluster.namespace, "labels": instance},
        "spec": {
            "podSelector": {"matchLabels": engine if stack else instance},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": allowed, "ports": [{"port": 8000}]}],
        },
    }
