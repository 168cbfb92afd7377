"""What a container of ours does on SageMaker: `python -m peagle.deploy.container serve`.

SageMaker starts an image with the word `serve`, says by environment variables what to do, and asks
/ping and /invocations at port 8080, or at $SAGEMAKER_BIND_TO_PORT. They become a command line of
`peagle serve`: SM_VLLM_A_B=value is vLLM's flag --a-b value, by one of two rule sets that
$PEAGLE_SM_RULES names:

- `aws`, the default: AWS's vLLM container (github.com/aws/deep-learning-containers at e0ecede,
  scripts/docker/vllm/sagemaker_args.py). `true` and nothing are a bare flag, `false` none; a JSON
  array is a value an element, an empty one no flag; several JSON objects are a value each; all
  else, one JSON object too, is one value as it is. Four flags take an array as one value.
- `plain`: vLLM's own (github.com/vllm-project/vllm, examples/deployment/sagemaker-entrypoint.sh).
  The value as it is, nothing is a bare flag.

The model is $SM_VLLM_MODEL, else what lies in /opt/ml/model, else $HF_MODEL_ID. $PEAGLE_ENGINE is
`native` (the default), which takes those of the flags that it has and refuses the others by name,
or `vllm`, which gets all of them.

Of model-hosting-container-standards, vLLM's own /ping and /invocations are made with it. Our server
is not, nor is a process supervised by it: it runs model.py and installs requirements.txt found
among the weights, which is code that nobody here has read; and SageMaker and Kubernetes start a
container again that has ended.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from peagle.deploy.spec import ENGINES
from peagle.errors import InputError, first_line

PREFIX, RULES = "SM_VLLM_", ("aws", "plain")
MODEL_FOLDER = Path("/opt/ml/model")
ONE_VALUE = ("allowed-origins", "allowed-methods", "allowed-headers", "middleware")
# vLLM's flags that `peagle serve` has, too, by its own names.
SERVE = {
    "host": "--host",
    "port": "--port",
    "api-key": "--api-key",
    "served-model-name": "--served-model-name",
    "dtype": "--dtype",
    "max-num-seqs": "--max-batch",
    "chat-template": "--chat-template",
}
HEAD = {"model": "--head", "num_speculative_tokens": "--k"}
ROUTE = ["--middleware", "peagle.server.route.Route"]

Flags = dict[str, list[str]]  # by name, with their values; none: a bare flag


def flags(environ: Mapping[str, str], rules: str) -> Flags:
    """vLLM's flags, in the order of the variables' names."""
    found: Flags = {}
    for key in sorted(key for key in environ if key.startswith(PREFIX)):
        name, value = key.removeprefix(PREFIX).lower().replace("_", "-"), environ[key]
        values = _as_aws(name, value) if rules == "aws" else [value] if value else []
        if values is not None:
            found[name] = values
    return found


def _as_aws(name: str, value: str) -> list[str] | None:
    """The values of a flag; None for no flag."""
    text = value.strip()
    if text.lower() in ("", "true"):
        return []
    if text.lower() == "false":
        return None
    if name not in ONE_VALUE and (parts := _json_parts(text)) is not None:
        return parts or None
    return [value]


def _json_parts(text: str) -> list[str] | None:
    """Elements of an array, or several objects, as texts; None for anything else."""
    try:
        if text.startswith("["):
            return [_text(element) for element in json.loads(text)]
        objects, at, decoder = list[Any](), 0, json.JSONDecoder()
        while text.startswith("{", at):
            found, end = decoder.raw_decode(text, at)
            objects.append(found)
            at = end + len(text[end:]) - len(text[end:].lstrip())
    except ValueError:
        return None
    several = len(objects) > 1 and at == len(text)
    return [_text(each) for each in objects] if several else None


def _text(element: Any) -> str:
    if isinstance(element, str):
        return element
    return "" if element is None else json.dumps(element, separators=(",", ":"))


def command(environ: Mapping[str, str], folder: Path = MODEL_FOLDER) -> list[str]:
    """The command line of `peagle serve`, behind the word peagle. Raises InputError that names the
    variable."""
    rules, engine = environ.get("PEAGLE_SM_RULES", "aws"), environ.get("PEAGLE_ENGINE", "native")
    for variable, value, known in (
        ("PEAGLE_SM_RULES", rules, RULES),
        ("PEAGLE_ENGINE", engine, ENGINES),
    ):
        if value not in known:
            raise InputError(f"{variable}={value}: choose {' or '.join(known)}")
    found = flags(environ, rules)
    port = environ.get("SAGEMAKER_BIND_TO_PORT", "8080")
    found = {"host": ["0.0.0.0"], "port": [port], **found}
    model = _model(found.pop("model", []), environ, folder)
    found.setdefault("served-model-name", [model])
    # Only SageMaker reaches the container: it has no key to bring, and its own name for it.
    line = ["serve", model, "--engine", engine, "--allow-no-key"]
    if engine == "vllm":
        return [*line, *_vllm(found, environ)]
    return [*line, "--allowed-hosts", "*", *_native(found)]


def _model(named: list[str], environ: Mapping[str, str], folder: Path) -> str:
    if named:
        return named[0]
    if folder.is_dir() and any(folder.iterdir()):
        return str(folder)
    if environ.get("HF_MODEL_ID"):
        return environ["HF_MODEL_ID"]
    raise InputError(f"no model: set {PREFIX}MODEL or HF_MODEL_ID, or mount one at {folder}")


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace("-", "_")


def _native(found: Flags) -> list[str]:
    """Our own options."""
    options = ["--device", "cuda"] if shutil.which("nvidia-smi") else []
    for name, values in found.items():
        if name == "speculative-config":
            options += _head(values)
        elif name not in SERVE:
            known = ", ".join(map(_variable, ("model", *SERVE, "speculative-config")))
            why = f"our engine has no such option (it has {known})"
            raise InputError(f"{_variable(name)}: {why}; PEAGLE_ENGINE=vllm takes all of vLLM's")
        else:
            options += _one(name, values)
    return options


def _one(name: str, values: list[str]) -> list[str]:
    if len(values) != 1:
        raise InputError(f"{_variable(name)}: takes one value, not {len(values)}")
    return [SERVE[name], *values]


def _head(values: list[str]) -> list[str]:
    """vLLM's --speculative-config as our options."""
    where = _variable("speculative-config")
    try:
        given = dict(json.loads("".join(values)))
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: is no JSON object ({first_line(error)})") from error
    for key in given:
        if key not in (*HEAD, "method", "parallel_drafting"):
            raise InputError(f"{where}: {key}: our engine has no such setting, leave it out")
    return [word for key in HEAD if key in given for word in (HEAD[key], str(given[key]))]


def _vllm(found: Flags, environ: Mapping[str, str]) -> list[str]:
    """Those that `peagle serve` must know, and the others behind --."""
    known = ["host", "port", "api-key"]
    if len(found["served-model-name"]) == 1:  # several are vLLM's alone
        known.append("served-model-name")
    before = [name for name in known if name in found]
    ours = [word for name in before for word in _one(name, found.pop(name))]
    behind = [word for name, values in found.items() for word in (f"--{name}", *values)]
    # vLLM finds this package only where it is installed beside it.
    route = ROUTE if "PEAGLE_VLLM_PYTHON" not in environ else []
    return [*ours, "--", *behind, *route]


def main(arguments: Iterable[str] = ()) -> None:
    """Become `peagle serve`."""
    try:
        if unknown := [word for word in arguments if word != "serve"]:
            raise InputError(f"{unknown[0]}: the one argument is the word serve")
        line = [sys.executable, "-m", "peagle", *command(os.environ)]
    except InputError as error:
        print(f"peagle: {error}", file=sys.stderr)
        sys.exit(2)
    os.execv(line[0], line)


if __name__ == "__main__":
    main(sys.argv[1:])
