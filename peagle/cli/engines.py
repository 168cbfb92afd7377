"""Which engine a command uses, where its options leave that open."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from peagle.cli.common import screen
from peagle.cli.options import with_flags
from peagle.errors import InputError
from peagle.vllm.process import default_engine

EngineOption = Annotated[
    str,
    "Engine that runs the model: auto, native or vllm. Auto is vllm on a machine with a GPU and an "
    "installed vLLM, else native.",
]
VllmPythonOption = Annotated[
    Path | None,
    typer.Option(
        "--vllm-python",
        envvar="PEAGLE_VLLM_PYTHON",
        help="Python interpreter that has vLLM installed. Default: the one that runs peagle.",
    ),
]
VLLM_DEVICES = ("auto", "cuda")  # values of --device that vLLM on a GPU serves, too


def resolve_engine(
    named: str, python: Path | None, native_only: Iterable[str], device: str
) -> Literal["native", "vllm"]:
    """The engine of `--engine`; what auto selects on a GPU machine is printed on stderr.

    `native_only` are the options given that vLLM lacks: with auto they select the native engine.
    """
    if named not in ("auto", "native", "vllm"):
        raise InputError(f"--engine {named!r}: choose auto, native or vllm")
    if named != "auto":
        return cast(Literal["native", "vllm"], named)
    choice = default_engine(python)
    if choice.engine == "vllm":
        for option in native_only:
            screen.print(f"engine: native, because vLLM has no {option}; without it, vLLM is used")
            return "native"
    if choice.why and device != "cpu":
        screen.print(with_flags(choice.why), markup=False)
    return choice.engine
