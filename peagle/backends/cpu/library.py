"""The C++ of native/: compiled at first use, in a few seconds, and kept in the user's cache."""

import ctypes
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from peagle.backends.cpu.structs import COUNT, POINTER, check_sizes
from peagle.errors import first_line
from peagle.paths import cache_dir, digest

SOURCES = Path(__file__).parent / "native"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fvisibility=hidden"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]  # without which loops of floor stay loops
# GCC leaves FMA out of short sums on some AMD CPUs; then a row's bits would depend on the others.
FLAGS += ["--param=avoid-fma-max-bits=0"]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
THREADS = ctypes.c_int
ARGUMENTS: dict[str, list[Any]] = {
    "decode": [POINTER, POINTER],
    "linear": [POINTER, POINTER, POINTER, COUNT, THREADS],
    "attend": [POINTER, POINTER, POINTER, COUNT, POINTER, POINTER, THREADS],
    "rank": [POINTER, COUNT, COUNT, COUNT, ctypes.c_int, POINTER, POINTER, THREADS],
}

log = logging.getLogger(__name__)


class NoCompiler(Exception):
    """The library cannot be compiled; the message is one line and says why."""


class Library:
    """The functions of native/library.cpp, by name and dtype."""

    def __init__(self, path: Path) -> None:
        self._loaded = ctypes.CDLL(str(path))
        check_sizes(self._loaded)
        self.tiles = bool(self._loaded.has_tiles())  # whether this CPU has AMX
        for name, arguments in ARGUMENTS.items():
            for dtype in DTYPES:
                self.function(name, dtype).argtypes = arguments
                self.function(name, dtype).restype = None

    def function(self, name: str, dtype: torch.dtype) -> Any:
        """One of ARGUMENTS, for tensors of one of DTYPES."""
        return getattr(self._loaded, f"{name}_{DTYPES[dtype]}")


@cache
def load() -> Library:
    """The compiled library. Raises NoCompiler."""
    try:
        return Library(_kept())
    except OSError as error:
        log.warning("native code is not kept: set PEAGLE_HOME to a writable folder (%s)", error)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return Library(_compile(Path(scratch)))
    except OSError as error:
        raise NoCompiler(first_line(error)) from None


def fingerprint() -> str:
    """A hash of the sources, of the compiler's name and of the processor."""
    texts = [path.read_text() for path in sorted(SOURCES.iterdir())]
    return digest(repr((texts, FLAGS, os.environ.get("CXX"), processor())).encode())


def _kept() -> Path:
    """The shared library in the cache, made where it is not there: one for each source, compiler
    and processor. Its name has the hash of its content: to load a damaged file could end the
    process. Raises OSError where the cache cannot be used."""
    key = fingerprint()
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"native-{key}-*.so"):
        if path.stem.endswith(digest(path.read_bytes())):
            return path
        log.warning("%s is damaged: it is compiled anew", path)
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = _compile(Path(scratch))
        return made.rename(folder / f"native-{key}-{digest(made.read_bytes())}.so")


def _compile(folder: Path) -> Path:
    """Make the library in a folder. OpenMP is not linked: it is the one that torch has loaded, and
    so there is one set of threads."""
    compiler = os.environ.get("CXX") or "c++"
    parts = [folder / "native.o", folder / "native.so"]
    try:
        words = shlex.split(compiler)  # as "ccache g++"
        compiling = [*words, *FLAGS, "-c", str(SOURCES / "library.cpp"), "-o", str(parts[0])]
        linking = [*words, "-shared", str(parts[0]), "-o", str(parts[1])]
        for command in (compiling, linking):
            subprocess.run(command, check=True, capture_output=True, text=True)
    except (FileNotFoundError, PermissionError, ValueError) as error:
        why = f"there is no C++ compiler {compiler!r}: install g++, or name one in $CXX"
        raise NoCompiler(why) from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [str(error)]
        first = next((line for line in lines if "error" in line), lines[-1])
        why = f"{compiler!r} fails ({first}): name another compiler in $CXX, g++ 9 or newer"
        raise NoCompiler(why) from error
    return parts[1]


def processor() -> str:
    """The description of the processor, on which `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("model name", "flags", "Features")
    return "".join(sorted({line for line in lines if line.startswith(named)}))
