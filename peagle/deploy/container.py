"""Entry point of peagle's container on SageMaker: `python -m peagle.deploy.container serve`.

SageMaker starts an image with the argument `serve` and with settings in environment variables. It
sends requests to /ping and /invocations at port 8080, or at $SAGEMAKER_BIND_TO_PORT. The variables
become a command line of `peagle serve`: SM_VLLM_A_B=value is vLLM's flag --a-b value.
$PEAGLE_SM_RULES names one of two sets of rules:

- `aws`, the default: AWS's vLLM container (github.com/aws/deep-learning-containers at e0ecede,
  scripts/docker/vllm/sagemaker_args.py). `true` and an empty value are a bare flag, `false` is no
  flag. Each element of a JSON array is a value; an empty array is no flag. Several JSON objects are
  a value each. Anything else, a single JSON object too, is one value. Four flags take an array as
  one value.
- `plain`: vLLM's own (github.com/vllm-project/vllm, examples/deployment/sagemaker-entrypoint.sh).
  The text is the value; an empty one is a bare flag.

The model is $SM_VLLM_MODEL, else the content of /opt/ml/model, else $HF_MODEL_ID. $PEAGLE_ENGINE is
`native` (the default), which refuses flags that it lacks, or `vllm`, which gets all flags.

The server does not use model-hosting-container-standards: that library runs model.py and installs
requirements.txt found among the weights, which is unread code. It need not supervise the process
either: SageMaker and Kubernetes restart a container that has ended.
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

PREFIX = "SM_VLLM_"
RULES = ("aws", "plain")
MODEL_FOLDER = Path("/opt/ml/model")
ONE_VALUE = ("allowed-origins", "allowed-methods", "allowed-headers", "middleware")
# vLLM's flags that `peagle serve` has, too: with vLLM the others follow --.
SERVE = ("host", "port", "api-key", "served-model-name")
SERVE_NATIVE = (*SERVE, "dtype", "max-num-seqs", "chat-template")
RENAMED = {"max-num-seqs": "max-batch"}
HEAD = {"model": "--head", "num_speculative_tokens": "--k"}
READ_FROM_HEAD = ("method", "parallel_drafting")
ROUTE = ["--middleware", "peagle.server.middleware.Route"]

Flags = dict[str, list[str]]  # by name, with their values; none: a bare flag


def flags(environ: Mapping[str, str], rules: str) -> Flags:
    """vLLM's flags, sorted by the names of the variables."""
    found: Flags = {}
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower().replace("_", "-")
            values = _values(name, environ[variable], rules)
            if values is not None:
                found[name] = values
    return found


def _values(name: str, value: str, rules: str) -> list[str] | None:
    """The values of a flag; None for no flag."""
    if rules == "plain":
        return [value] if value else []
    text = value.strip()
    if text.lower() in ("", "true"):
        return []
    if text.lower() == "false":
        return None
    parts = None if name in ONE_VALUE else _json_parts(text)
    if parts is None:
        return [value]
    return parts or None


def _json_parts(text: str) -> list[str] | None:
    """Elements of an array, or several objects, as texts; None for anything else."""
    decoder, objects, rest = json.JSONDecoder(), list[Any](), text
    try:
        if text.startswith("["):
            return [_text(element) for element in json.loads(text)]
        while rest.startswith("{"):
            found, end = decoder.raw_decode(rest)
            objects.append(found)
            rest = rest[end:].lstrip()
    except ValueError:
        return None
    several = len(objects) > 1 and not rest
    return [_text(each) for each in objects] if several else None


def _text(element: Any) -> str:
    if isinstance(element, str):
        return element
    return "" if element is None else json.dumps(element, separators=(",", ":"))


def command(environ: Mapping[str, str], folder: Path = MODEL_FOLDER) -> list[str]:
    """The arguments of `peagle` that serve the model. InputErrors name the variable."""
    rules = _choice(environ, "PEAGLE_SM_RULES", RULES)
    engine = _choice(environ, "PEAGLE_ENGINE", ENGINES)
    port = environ.get("SAGEMAKER_BIND_TO_PORT", "8080")
    found = {"host": ["0.0.0.0"], "port": [port], **flags(environ, rules)}
    model = _model(found.pop("model", []), environ, folder)
    found.setdefault("served-model-name", [model])
    # Only SageMaker reaches the container. It sends no key, and a host name of its own.
    line = ["serve", model, "--engine", engine, "--allow-no-key"]
    if engine == "native":
        return [*line, "--allowed-hosts", "*", *_native(found)]
    # vLLM can import this package only if both are in one environment.
    route = [] if "PEAGLE_VLLM_PYTHON" in environ else ROUTE
    return [*line, *_vllm(found), *route]


def _choice(environ: Mapping[str, str], variable: str, choices: tuple[str, ...]) -> str:
    """The value of a variable; without it the first choice."""
    value = environ.get(variable, choices[0])
    if value not in choices:
        raise InputError(
            "is unknown", field=variable, value=value, fix=f"choose {' or '.join(choices)}"
        )
    return value


def _model(named: list[str], environ: Mapping[str, str], folder: Path) -> str:
    if named:
        return named[0]
    if folder.is_dir() and any(folder.iterdir()):
        return str(folder)
    if environ.get("HF_MODEL_ID"):
        return environ["HF_MODEL_ID"]
    fix = f"set {PREFIX}MODEL or HF_MODEL_ID, or mount one at {folder}"
    raise InputError("no model is named", fix=fix)


def _native(found: Flags) -> list[str]:
    """Options of `peagle serve` with the native engine."""
    options = ["--device", "cuda"] if shutil.which("nvidia-smi") else []
    for name, values in found.items():
        if name == "speculative-config":
            options += _head(values)
        elif name in SERVE_NATIVE:
            options += _option(name, values)
        else:
            known = ", ".join(map(_variable, ("model", *SERVE_NATIVE, "speculative-config")))
            why = f"the native engine has no such option (it has {known})"
            fix = "PEAGLE_ENGINE=vllm takes all of vLLM's"
            raise InputError(why, field=_variable(name), fix=fix)
    return options


def _vllm(found: Flags) -> list[str]:
    """Options of `peagle serve` with vLLM, and vLLM's own after --."""
    before, after = list[str](), list[str]()
    for name, values in found.items():
        several_names = name == "served-model-name" and len(values) > 1
        if name in SERVE and not several_names:
            before += _option(name, values)
        else:
            after += [f"--{name}", *values]
    return [*before, "--", *after]


def _option(name: str, values: list[str]) -> list[str]:
    if len(values) != 1:
        raise InputError(f"takes one value, not {len(values)}", field=_variable(name))
    return [f"--{RENAMED.get(name, name)}", *values]


def _head(values: list[str]) -> list[str]:
    """vLLM's --speculative-config as options of `peagle serve`."""
    field = _variable("speculative-config")
    try:
        given = dict(json.loads("".join(values)))
    except (ValueError, TypeError) as error:
        raise InputError(f"is no JSON object ({first_line(error)})", field=field) from error
    options = []
    for key, value in given.items():
        if key in HEAD:
            options += [HEAD[key], str(value)]
        elif key not in READ_FROM_HEAD:
            why = f"the native engine has no setting {key}"
            raise InputError(why, field=field, fix="leave it out")
    return options


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace("-", "_")


def main(arguments: Iterable[str] = ()) -> None:
    """Become `peagle serve`."""
    try:
        if unknown := [word for word in arguments if word != "serve"]:
            raise InputError(f"unknown argument {unknown[0]}", fix="the only argument is `serve`")
        line = [sys.executable, "-m", "peagle", *command(os.environ)]
    except InputError as error:
        print(f"peagle: {error}", file=sys.stderr)
        sys.exit(2)
    os.execv(line[0], line)


if __name__ == "__main__":
    main(sys.argv[1:])
