"""The interpreter that has vLLM."""

import os

import pytest


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """`make test-vllm` names it; without it the tests of the real vLLM are skipped."""
    python = os.environ.get("PEAGLE_VLLM_PYTHON")
    if not python:
        pytest.skip("PEAGLE_VLLM_PYTHON is not set: `make test-vllm` sets vLLM up and sets it")
    return python
