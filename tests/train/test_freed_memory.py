"""Freed memory is kept where glibc can keep it."""

import platform
import subprocess
import sys

import pytest

PAGES = 5_000_000 * 4 // 4096  # of a tensor, which is smaller than what glibc always maps
# Page faults of ten such tensors together, five times, after the same ten have been freed three
# times: until then small objects may lie between them.
FAULTS = """
import resource, torch
from peagle.train.processes import keep_freed_memory
keep_freed_memory()
def allocate():
    tensors = [torch.ones(5_000_000) for _ in range(10)]
for _ in range(3):
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep freed memory")
def test_freed_memory_is_used_again() -> None:
    """Otherwise most of the fifty tensors get new pages."""
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(run.stdout) <= 5 * PAGES
