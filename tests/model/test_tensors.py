"""The memory that is left: the machine's, or less in a container."""

from pathlib import Path

import psutil
import pytest
import torch

from peagle.model import tensors
from peagle.model.tensors import free_memory, main_memory

MACHINE = psutil.virtual_memory()._replace(total=256_000, available=200_000)
STAT = "anon 900\nfile 700\nactive_anon 5\ninactive_file 400\nactive_file 200\n"


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    monkeypatch.setattr(tensors, "CGROUP", tmp_path)
    return tmp_path


def limit(group: Path, most: str, used: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(STAT)


def test_a_machine_without_limits(group: Path) -> None:
    assert main_memory() == (256_000, 200_000)
    limit(group, "max", 3000)
    assert main_memory() == (256_000, 200_000)


def test_a_container_has_what_its_limit_leaves(group: Path) -> None:
    """Memory that holds parts of files gives way."""
    limit(group, "8000", 3000)
    assert main_memory() == (8000, 8000 - 3000 + 600)
    assert free_memory(torch.device("cpu")) == 5600


def test_what_torch_keeps_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"mem_get_info": (1000, 8000), "memory_reserved": 500, "memory_allocated": 200}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda")) == 1000 + 500 - 200


def test_a_limit_beyond_the_machine_is_none(group: Path) -> None:
    limit(group, "900000", 3000)
    assert main_memory() == (256_000, 200_000)
