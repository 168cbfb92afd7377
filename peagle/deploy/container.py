"""Entry point of peagle's container on SageMaker: `python -m peagle.deploy.container serve`.

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

PREFIX = "SM_VLLM_"
RULES = ("aws", "plain")
MODEL_FOLDER = Path("/opt/ml/model")
ONE_VALUE = ("allowed-origins", "allowed-methods", "allowed-headers", "middleware")
# vLLM's flags that `peagle serve` has, too: with vLLM the others follow --.
SERVE = ("host", "port", "api-key", "served-model-name")
SERVE_NATIVE = (*SERVE, "dtype", "max-num-seqs", "chat-template")
RENAMED = {"max-num-seqs": "max-batch"}
HEAD = {"model": "--head", "num_speculative_tokens": "--k"}
HEAD_SAYS_ITSELF = ("method", "parallel_drafting")
ROUTE = ["--middleware", "peagle.server.middleware.Route"]

Flags = dict[str, list[str]]  # by name, with their values; none: a bare flag


def flags(environ: Mapping[str, str], rules: str) -> Flags:
    """vLLM's flags, in the order of the variables' names."""
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
    """The command line of `peagle serve`, after the word peagle. Raises InputError that names the
    variable."""
    rules = _choice(environ, "PEAGLE_SM_RULES", RULES)
    engine = _choice(environ, "PEAGLE_ENGINE", ENGINES)
    port = environ.get("SAGEMAKER_BIND_TO_PORT", "8080")
    found = {"host": ["0.0.0.0"], "port": [port], **flags(environ, rules)}
    model = _model(found.pop("model", []), environ, folder)
    found.setdefault("served-model-name", [model])
    # Only SageMaker reaches the container: it has no key to bring, and its own name for it.
    line = ["serve", model, "--engine", engine, "--allow-no-key"]
    if engine == "native":
        return [*line, "--allowed-hosts", "*", *_native(found)]
    # vLLM finds this package only where it is installed beside it.
    route = [] if "PEAGLE_VLLM_PYTHON" in environ else ROUTE
    return [*line, *_vllm(found), *route]


def _choice(environ: Mapping[str, str], variable: str, choices: tuple[str, ...]) -> str:
    """The value of a variable; without it the first choice."""
    value = environ.get(variable, choices[0])
    if value not in choices:
        raise InputError(f"{variable}={value}: choose {' or '.join(choices)}")
    return value


def _model(named: list[str], environ: Mapping[str, str], folder: Path) -> str:
    if named:
        return named[0]
    if folder.is_dir() and any(folder.iterdir()):
        return str(folder)
    if environ.get("HF_MODEL_ID"):
        return environ["HF_MODEL_ID"]
    raise InputError(f"no model: set {PREFIX}MODEL or HF_MODEL_ID, or mount one at {folder}")


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
            raise InputError(f"{_variable(name)}: {why}; PEAGLE_ENGINE=vllm takes all of vLLM's")
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
        raise InputError(f"{_variable(name)}: takes one value, not {len(values)}")
    return [f"--{RENAMED.get(name, name)}", *values]


def _head(values: list[str]) -> list[str]:
    """vLLM's --speculative-config as options of `peagle serve`."""
    where = _variable("speculative-config")
    try:
        given = dict(json.loads("".join(values)))
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: is no JSON object ({first_line(error)})") from error
    options = []
    for key, value in given.items():
        if key in HEAD:
            options += [HEAD[key], str(value)]
        elif key not in HEAD_SAYS_ITSELF:
            raise InputError(f"{where}: {key}: the native engine has no such setting, leave it out")
    return options


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace("-", "_")


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
