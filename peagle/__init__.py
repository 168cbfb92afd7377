"""P-EAGLE: train, measure and serve parallel-drafting heads for speculative decoding.

`LLM` generates with a target and an optional head; `load_drafter` reads a head. They are
loaded on first use, so that `import peagle` (and `peagle --version`) does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.engine.params import SamplingParams
    from peagle.engine.run import Completion
    from peagle.heads.load import load_drafter
    from peagle.model.drafter import Drafter

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Drafter", "SamplingParams", "__version__", "load_drafter"]

_HOMES = {
    "LLM": "peagle.engine.llm",
    "Completion": "peagle.engine.run",
    "SamplingParams": "peagle.engine.params",
    "Drafter": "peagle.model.drafter",
    "load_drafter": "peagle.heads.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'peagle' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
