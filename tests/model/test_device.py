"""Freed memory is kept where glibc can keep it."""

import platform
import subprocess
import sys

import pytest

# Page faults of ten tensors of 20 MB together, after the same ten have been freed.
FAULTS = """
import resource, torch
from peagle.model.device import keep_freed_memory
{call}
def allocate():
    tensors = [torch.ones(5_000_000) for _ in range(10)]
allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep freed memory")
def test_freed_memory_is_used_again() -> None:
    faults = {}
    for call in ("", "keep_freed_memory()"):
        code = FAULTS.format(call=call)
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        faults[call] = int(run.stdout)
    assert faults["keep_freed_memory()"] < 0.2 * faults[""]
