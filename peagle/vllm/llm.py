"""vllm.LLM in a process of its own, which runs prompts as the target of this process does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.model.loader import locate
from peagle.model.target import Target
from peagle.vllm.process import SCRIPT_ENVIRONMENT, Process, environment

SCRIPT = str(Path(__file__).with_name("llm_script.py"))


def start_llm(
    python: Path,
    target: Target,
    arguments: Mapping[str, Any],
    log: Path,
    environ: Mapping[str, str] = SCRIPT_ENVIRONMENT,
) -> Process:
    """Start `llm_script.py` in the interpreter `python`; its docstring describes the messages.

    `arguments` are further ones of vllm.LLM.
    """
    path, revision = locate(target.name)
    llm = {
        "model": path,
        "revision": revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "enforce_eager": True,  # compiling takes longer than what is run
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # the counters are among them
        "seed": 0,
        **arguments,
    }
    return Process([str(python), SCRIPT, json.dumps(llm)], environment(environ), log)
