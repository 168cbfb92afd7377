"""Fixtures of all tests; tiny.py and families.py make the tiny random models."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from peagle.model.target import Target

if not torch.cuda.is_available():  # before anything imports Triton, as transformers does
    os.environ["TRITON_INTERPRET"] = "1"

# A cache of the tests' own. Where a file stands in place of the folder of costs none are kept: each
# test measures them, whatever ran before.
HOME = Path(__file__).parents[1] / ".pytest_cache" / "peagle"
HOME.mkdir(parents=True, exist_ok=True)
(HOME / "costs").touch()
os.environ["PEAGLE_HOME"] = str(HOME)


@pytest.fixture(scope="session")
def tokenizer() -> "PreTrainedTokenizerFast":
    from tiny import make_tokenizer  # noqa: PLC0415

    return make_tokenizer()


@pytest.fixture(scope="session")
def target() -> "Target":
    """A tiny Llama. Targets never change, so all tests share it."""
    from tiny import make_target  # noqa: PLC0415

    return make_target()


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM: `make test-vllm` names it; otherwise its tests are skipped."""
    python = os.environ.get("PEAGLE_VLLM_PYTHON")
    if not python:
        pytest.skip("PEAGLE_VLLM_PYTHON is not set: `make test-vllm` sets vLLM up and sets it")
    return python


@pytest.fixture
def benchmark_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that imports a script of benchmarks/ by name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return import_module
