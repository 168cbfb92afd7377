"""Entry point of peagle's images: `python -m peagle.deploy.container serve`, as on SageMaker.

$PEAGLE_SERVE has the arguments of `peagle serve`, as a shell has them; a model at /opt/ml/model is
named so. The server listens at port 8080, or at $SAGEMAKER_BIND_TO_PORT, and asks for no key unless
$PEAGLE_API_KEY has one: on SageMaker only SageMaker reaches it, under a host name of its own.

It needs no supervisor, since SageMaker and Kubernetes restart a container that has ended, and runs
no code from the model's folder, as AWS's images do.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping

from peagle.errors import InputError, first_line

VARIABLE = "PEAGLE_SERVE"


def command(environ: Mapping[str, str]) -> list[str]:
    """The arguments of `peagle`. Raises InputError that names the variable."""
    text = environ.get(VARIABLE, "")
    try:
        given = shlex.split(text)
    except ValueError as error:
        raise InputError(first_line(error), field=VARIABLE, value=text) from error
    if not given:
        fix = "set it to the arguments of peagle serve, as smollm2-135m"
        raise InputError("is missing", field=VARIABLE, fix=fix)
    where = ["--host", "0.0.0.0", "--port", environ.get("SAGEMAKER_BIND_TO_PORT", "8080")]
    vllm = "engine vllm" in " ".join(given).replace("=", " ")
    hosts = [] if vllm else ["--allowed-hosts", "*"]
    return ["serve", *where, "--allow-no-key", *hosts, *given]  # of two values the last counts


def main(arguments: Iterable[str]) -> None:
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
