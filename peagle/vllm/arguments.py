"""Arguments of vllm.LLM for the scripts of this folder."""

from typing import Any

from peagle.model.loader import locate
from peagle.model.target import Target


def llm_arguments(target: Target) -> dict[str, Any]:
    """Return the arguments that run `target` as this process runs it, a prompt at a time."""
    path, revision = locate(target.name)
    return {
        "model": path,
        "revision": revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "enforce_eager": True,  # compiling takes longer than what is run
        "enable_prefix_caching": False,
        "seed": 0,
    }
