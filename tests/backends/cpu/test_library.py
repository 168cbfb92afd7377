"""The compiled library: made once, and one clear line where it cannot be made."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle.backends.cpu import library
from peagle.backends.cpu.backend import CpuBackend


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "peagle"))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "there is no C++ compiler 'no-such-compiler': install g++, or name"),
        ("false", "non-zero exit status"),
    ],
)
def test_without_a_compiler(
    compiler: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line tells of it, and nothing half-made is left."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(library.NoCompiler) as raised:
        CpuBackend()
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not list((tmp_path / "peagle").iterdir())


def test_the_library_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.load()
    (made,) = (tmp_path / "peagle").iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    library.load.cache_clear()
    library.load()
    assert made.suffix == ".so"
