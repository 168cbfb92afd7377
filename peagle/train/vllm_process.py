"""vLLM runs in an interpreter of its own: which one, and in what environment."""

import os
import subprocess
from pathlib import Path

from peagle.config import InputError

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
