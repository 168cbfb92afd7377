"""Kubernetes: a deployment in the words of vLLM's production-stack chart, of KServe, or as plain
manifests, and the command of helm or kubectl that takes it. Nothing is managed here.
"""

import hashlib
import shlex
import shutil
import subprocess

from peagle.deploy.data import facts, render
from peagle.deploy.plan import Plan
from peagle.errors import InputError
from peagle.vllm.flags import flag_options

COMMANDS = {
    "stack": "helm upgrade --install {name} vllm-stack --version 0.1.12 "
    "--repo https://vllm-project.github.io/production-stack -n {namespace} -f {file}",
    "kserve": "kubectl apply -f {file}",
    "manifests": "kubectl apply -f {file}",
}
# Options for which a form has a field.
OWN_FIELDS = {
    "stack": ("tensor-parallel-size", "enable-prefix-caching"),
    "kserve": ("tensor-parallel-size", "served-model-name", "revision"),
}


def rendered(plan: Plan, form: str, namespace: str, *, pinned: bool) -> str:
    """The deployment as YAML, after the commands to run first; `pinned`: on nodes with such a GPU
    only. Raises InputError for what a form cannot do."""
    if form not in COMMANDS:
        fix = f"choose one of {', '.join(COMMANDS)}"
        raise InputError("is unknown", field="form", value=form, fix=fix)
    if plan.engine == "native" and form != "manifests":
        why = f"runs vLLM only, and {plan.name} is served by the native engine"
        raise InputError(why, field="form", value=form, fix="choose manifests")
    if plan.max_replicas is not None and form != "stack":
        why = "only the stack is scaled"
        fix = "leave it out, or scale by an object of your own"
        raise InputError(why, field="max_replicas", value=plan.max_replicas, fix=fix)
    own = OWN_FIELDS.get(form, ())
    options = {name: value for name, value in plan.options.items() if name not in own}
    arguments = [flag_options({name: value}) for name, value in options.items()]
    gpu = facts().gpus[plan.gpu] if pinned and plan.gpu else None
    cuda = facts().cuda.get((plan.cuda or "").partition(".")[0])
    start = shlex.join(command(plan, form, namespace, "FILE"))
    unique = hashlib.sha256(f"{namespace}/{plan.resource}".encode()).hexdigest()
    return render(
        f"{form}.yaml.j2", plan=plan, namespace=namespace, arguments=arguments, gpu=gpu, cuda=cuda,
        start=start, model_name=f"m{unique[:5]}",
    )  # fmt: skip


def command(plan: Plan, form: str, namespace: str, file: str = "-") -> list[str]:
    """The command of helm or kubectl that takes the YAML in `file`."""
    return shlex.split(COMMANDS[form].format(name=plan.resource, namespace=namespace, file=file))


def run(line: list[str], given: str) -> int:
    """Run a command of helm or kubectl in the foreground; its exit code."""
    if shutil.which(line[0]) is None:
        fix = "install it, or use what `dry_run` prints"
        raise InputError(f"{line[0]} is not on the PATH", fix=fix)
    return subprocess.run(line, input=given, text=True, check=False).returncode
