"""The library compiled for every instruction set that it has code for and this processor runs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peagle.backends.cpu import library

TILES = Path(__file__).with_name("tiles.h")
FOURS = Path(__file__).with_name("fours.h")
# What g++ is told, and the flags of /proc/cpuinfo that the code then needs.
SETS = {
    "native": ("-march=native", []),
    "avx512-bf16-vnni": (
        "-march=x86-64-v4 -mavx512bf16 -mavx512vnni",
        ["avx512_bf16", "avx512_vnni"],
    ),
    "amx, emulated": (
        f"-march=x86-64-v4 -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -include {TILES}",
        ["avx512_bf16", "avx512_vnni"],
    ),
    "avx512": ("-march=x86-64-v4", ["avx512bw", "avx512dq", "avx512vl"]),
    "avx-vnni, emulated": (f"-march=x86-64-v3 -include {FOURS}", ["avx2", "fma", "bmi2"]),
    "avx2": ("-march=x86-64-v3", ["avx2", "fma", "bmi2"]),
    "sse": ("-march=x86-64-v2", ["sse4_2"]),
}


def processor_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an instruction set that the library is compiled for."""
    name: str = request.param
    told, needed = SETS[name]
    if missing := sorted(set(needed) - processor_flags()):
        pytest.skip(f"this processor has no {', '.join(missing)}")
    flags = [flag for flag in library.FLAGS if "march" not in flag]
    monkeypatch.setattr(library, "FLAGS", [*told.split(), *flags])
    library.load.cache_clear()
    library.load()
    yield name
    library.load.cache_clear()
