"""Weights lie in memory of large pages, each from the start of a cache line."""

import mmap
from pathlib import Path

import pytest
import torch

from peagle.backends.cpu.pages import CHUNK, LINE, LargePages

TENSORS = [
    torch.arange(7, dtype=torch.bfloat16),
    torch.arange(12, dtype=torch.int32).view(3, 4),
    torch.full((CHUNK + 5,), 9, dtype=torch.uint8),  # more than a chunk
    torch.tensor(2.5),
]


def test_copies_are_equal_and_apart() -> None:
    pages = LargePages()
    copies = [pages.copy(tensor) for tensor in TENSORS]
    for tensor, copy in zip(TENSORS, copies, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.data_ptr() % LINE == 0
    spans = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_small_tensors_share_a_chunk_that_lives_as_long_as_they_do() -> None:
    pages = LargePages()
    first, second = pages.copy(TENSORS[0]), pages.copy(TENSORS[1])
    assert second.data_ptr() - first.data_ptr() == LINE
    del pages, first
    torch.ones(CHUNK, dtype=torch.uint8)
    assert torch.equal(second, TENSORS[1])


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are asked for on Linux")
def test_large_pages_are_asked_for() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    copy = LargePages().copy(TENSORS[0])
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start <= copy.data_ptr() < end
        elif inside and name == "VmFlags:":
            flags = " ".join(rest)
    assert "hg" in flags.split()
