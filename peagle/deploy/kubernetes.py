"""Kubernetes: a deployment in the words of vLLM's production-stack chart, of KServe, or as plain
manifests, and the commands of helm and kubectl that apply and manage it. Nothing is managed here.
"""

import hashlib
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from peagle.catalog import flag_options
from peagle.deploy.facts import facts
from peagle.deploy.plan import Plan, check_replicas
from peagle.deploy.render import render
from peagle.errors import InputError
from peagle.vllm.process import numbers

COMMANDS = yaml.safe_load(
    Path(__file__).with_name("templates").joinpath("commands.yaml").read_text()
)
SHUTDOWN_SECONDS = {"stack": 25, "manifests": 100}  # KServe sets its own
# Options for which a form has a field.
OWN_FIELDS = {
    "stack": ("tensor-parallel-size", "enable-prefix-caching"),
    "kserve": ("tensor-parallel-size", "served-model-name", "revision"),
    "manifests": (),
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
        check_replicas(self.replicas, self.max_replicas)
        if self.max_replicas is not None and self.form != "stack":
            why, fix = "only the stack is scaled", "leave it out, or scale by an object of your own"
            raise InputError(why, field="max_replicas", value=self.max_replicas, fix=fix)


def rendered(plan: Plan, cluster: Cluster, *, pinned: bool) -> str:
    """The deployment as YAML, after the commands that it wants; `pinned`: on nodes with such a GPU
    only. Raises InputError for our engine in a form for vLLM."""
    if plan.engine == "native" and cluster.form != "manifests":
        why = f"runs vLLM only, and {plan.name} is served by the native engine"
        raise InputError(why, field="form", value=cluster.form, fix="choose manifests")
    own = OWN_FIELDS[cluster.form]
    options = {name: value for name, value in plan.options.items() if name not in own}
    drains = plan.vllm is None or numbers(plan.vllm) >= numbers(facts().shutdown_timeout_since)
    if plan.engine == "vllm" and drains and cluster.form in SHUTDOWN_SECONDS:
        options["shutdown-timeout"] = SHUTDOWN_SECONDS[cluster.form]
    unique = hashlib.sha256(f"{cluster.namespace}/{plan.resource}".encode()).hexdigest()
    return render(
        f"{cluster.form}.yaml.j2",
        plan=plan,
        cluster=cluster,
        arguments=tuple(flag_options(options)),
        shell=shlex.join,
        gpu=facts().gpus[plan.gpu] if pinned and plan.gpu else None,
        cuda=facts().cuda.get((plan.cuda or "").partition(".")[0]),
        start=shlex.join(command("start", plan.resource, cluster, file="FILE")),
        model_name=f"m{unique[:5]}",
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
