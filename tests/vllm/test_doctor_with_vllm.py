"""`peagle doctor --vllm-python` with the real vLLM: a healthy head passes, a damaged one does not.

`make test-vllm` runs this; PEAGLE_VLLM_PYTHON names the interpreter.
"""

import os
from pathlib import Path

import pytest

from peagle.catalog import head_path
from peagle.methods.load import load_drafter
from peagle.model.loader import load_target
from peagle.model.target import Target
from peagle.tools.doctor import examine

pytestmark = pytest.mark.vllm
TARGET = "smollm2-135m"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGET, dtype="float32")


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_shipped_heads_pass(method: str, target: Target) -> None:
    python = os.environ.get("PEAGLE_VLLM_PYTHON")
    if not python:
        pytest.skip("PEAGLE_VLLM_PYTHON is not set: `make test-vllm` sets vLLM up and sets it")
    head = head_path(TARGET, method)
    assert head is not None and load_drafter(head, target)
    checks = examine(head, target, vllm_python=Path(python))
    assert [check for check in checks if check.state == "wrong"] == []
    assert checks[-1].name == "vllm" and checks[-1].found.startswith("the same")
