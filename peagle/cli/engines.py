"""Which engine a command uses, where its options leave that open."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from peagle.cli.common import screen
from peagle.cli.options import flag, with_flags
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
LEAVE_OUT = "leave it out, or set `engine` to native"
# Options of the native engine only: why vLLM has none, and what to do with vLLM.
NOT_VLLMS = {
    "k adaptive": ("cannot choose K every round", "give numbers, as `k` 7"),
    "nodes": ("drafts chains only", "give `k`"),
    "no_lookup": ("drafts by the head alone", LEAVE_OUT),
    "methods lookup": ("drafts by a head only", LEAVE_OUT),
    "device": ("finds its devices itself", LEAVE_OUT),
    "quantize": ("has its own --quantization", "give that after -- of peagle serve"),
    "kv_tokens": ("sizes its cache in bytes", "give its --kv-cache-memory-bytes after --"),
    "allowed_hosts": ("answers to every name", LEAVE_OUT),
    "max_queue": ("has no limit of waiting requests", LEAVE_OUT),
    "max_seconds": ("has no limit of time", LEAVE_OUT),
}


def not_vllms(name: str) -> InputError:
    """The error of an option that vLLM lacks."""
    field, _, value = name.partition(" ")
    why, fix = NOT_VLLMS[name]
    return InputError(f"vLLM {why}", field=field, value=value or None, fix=fix)


def resolve_engine(
    named: str, python: Path | None, options: Collection[str], device: str
) -> Literal["native", "vllm"]:
    """The engine of `--engine`; what auto selects on a GPU machine is printed on stderr.

    Those of the given `options` that vLLM lacks select the native engine with auto, and are
    refused with vllm.
    """
    lacking = [name for name in NOT_VLLMS if name in options]
    if device in VLLM_DEVICES and "device" in lacking:
        lacking.remove("device")
    if named not in ("auto", "native", "vllm"):
        raise InputError("choose auto, native or vllm", field="engine", value=named)
    if named == "vllm" and lacking:
        raise not_vllms(lacking[0])
    if named != "auto":
        return cast(Literal["native", "vllm"], named)
    choice = default_engine(python)
    if choice.engine == "vllm" and lacking:
        why = f"vLLM has no {flag(lacking[0])}; without it, vLLM is used"
        screen.print(f"engine: native, because {why}")
        return "native"
    if choice.why and device != "cpu":
        screen.print(with_flags(choice.why), markup=False)
    return choice.engine
