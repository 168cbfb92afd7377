"""The compiled library: made once, and one clear line where it cannot be made."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peagle.backends.choose import choose_backend
from peagle.backends.cpu import library, structs
from peagle.backends.torch import TorchBackend


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, and code that is compiled fast."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "peagle"))
    monkeypatch.setattr(library, "FLAGS", [*library.FLAGS, "-O0"])
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "there is no C++ compiler 'no-such-compiler': install g++, or name"),
        ("env no-such-compiler", "'env no-such-compiler' fails (env: "),
        ("'g++", 'there is no C++ compiler "\'g++": install g++, or name'),
        ("/", "there is no C++ compiler '/': install g++, or name"),
        ("false", "'false' fails (Command"),
    ],
)
def test_without_a_compiler(
    compiler: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line tells of it, and nothing half-made is left."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(library.NoCompiler) as raised:
        library.load()
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not list((tmp_path / "peagle").iterdir())


def test_the_library_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.load()
    (made,) = (tmp_path / "peagle").iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    library.load.cache_clear()
    library.load()
    assert made.suffix == ".so"


def test_structures_of_other_sizes_are_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong numbers or a crash would follow."""
    monkeypatch.setattr(structs, "Kept", structs.Spec)
    with pytest.raises(AssertionError, match="Spec is not that of native/"):
        library.load()


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm to list symbols")
def test_two_libraries_of_a_process_share_nothing(tmp_path: Path) -> None:
    """Unique symbols (u), such as the thread-local room of templates, would be one in both: of the
    first one's sizes, and in other instructions' layouts."""
    library.load()
    [made] = (tmp_path / "peagle").iterdir()
    listed = ["nm", "--dynamic", "--defined-only", "--format=posix", str(made)]
    lines = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    # Others are the standard library's, which has its own on some systems.
    symbols = [line.split()[:2] for line in lines]
    own = {name: kind for name, kind in symbols if name[0] != "_" or "6peagle" in name}
    assert set(own.values()) <= {"T", "D", "W"}
    names = {f"{name}_{dtype}" for name in library.ARGUMENTS for dtype in library.DTYPES.values()}
    assert {name for name, kind in own.items() if kind != "W"} == {
        *names,
        "has_tiles",
        "struct_sizes",
    }


def test_a_damaged_library_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut off, as a full disk leaves it: to load it would end the process."""
    library.load()
    (made,) = (tmp_path / "peagle").iterdir()
    whole = made.read_bytes()
    made.unlink()  # what this process has loaded stays
    made.write_bytes(whole[: len(whole) // 2])
    library.load.cache_clear()
    assert library.load().tiles in (True, False)
    (message,) = caplog.messages
    assert message == f"{made} is damaged: it is compiled anew"
    (made,) = (tmp_path / "peagle").iterdir()
    assert len(made.read_bytes()) == len(whole)


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is compiled into a temporary folder, and one line says what would keep it."""
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "file" / "peagle"))
    assert library.load().tiles in (True, False)
    (message,) = caplog.messages
    assert message.startswith("native code is not kept: set PEAGLE_HOME to a writable folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_code_of_another_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.load()
    library.load.cache_clear()
    monkeypatch.setattr(library, "processor", lambda: "another one")
    library.load()
    assert len(list((tmp_path / "peagle").iterdir())) == 2


def test_a_compiler_of_several_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As "ccache g++". An empty name is none, and another compiler makes another library."""
    compiler = os.environ.get("CXX") or "c++"
    for count, named in enumerate(["", f"env {compiler}", f"{compiler} -w"], start=1):
        monkeypatch.setenv("CXX", named)
        library.load.cache_clear()
        library.load()
        assert len(list((tmp_path / "peagle").iterdir())) == count


def test_a_compiler_that_does_not_know_the_processor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference runs, and one line says what to do."""
    monkeypatch.setattr(library, "FLAGS", ["-march=no-such-processor"])
    assert isinstance(choose_backend(torch.device("cpu"), torch.float32), TorchBackend)
    (message,) = caplog.messages
    assert "no-such-processor" in message
    assert "name another compiler in $CXX, g++ 9 or newer" in message
