"""Writing files, and errors of files that cannot be used."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from peagle.errors import InputError, first_line
from peagle.paths import cache_dir, digest


def unusable(
    error: Exception, path: Path | None = None, field: str = "output", kept: str = ""
) -> InputError:
    """The error of a file or folder that cannot be read or written: its path, why, and the fix,
    which adds what is `kept`. `path` is the one that the user named; an error of a file elsewhere
    names that file."""
    file = getattr(error, "filename", None)
    why = getattr(error, "strerror", None) or first_line(error)
    room = "make room, or " if "No space left" in why else ""
    if path and (file is None or Path(str(file)).absolute().is_relative_to(path.absolute().parent)):
        file = path
    fix = room + (cache_fix(f"{file} {why}") or "name another path")
    fix = f"{fix}; {kept}" if kept else fix
    where = None if file is None else Path(str(file))
    return InputError(why, field=field if path and file is path else None, value=where, fix=fix)


def cache_fix(text: str) -> str:
    """The fix for a message that names a cache which cannot be written; empty for others."""
    from huggingface_hub.constants import HF_HOME  # noqa: PLC0415 (takes time)

    marks = {"PEAGLE_HOME": str(cache_dir()), "HF_HOME": HF_HOME, "TMPDIR": "temporary directory"}
    moved = [variable for variable, mark in marks.items() if mark in text]
    return f"set {moved[0]} to a folder that can be written" if moved else ""


@contextmanager
def writing(path: Path, field: str = "output", kept: str = "") -> Iterator[None]:
    """Raises InputError, which names `path`, where something cannot be written there; `kept`: what
    was written before."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter: for a full disk
        raise unusable(error, path, field, kept) from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to; its file takes the place of `file` when the block ends, on the disk
    by then: all of it or none. Raises OSError."""
    made = file.with_name(f".{file.name}")
    try:
        yield made
        with made.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(made, file)
    except SafetensorError as error:  # the writer's word for a full disk
        raise OSError(str(error)) from error
    finally:
        made.unlink(missing_ok=True)


def share(made: Path) -> None:
    """Let all users read a file, or a folder and what is in it: safetensors and mkdtemp make them
    private. Raises OSError."""
    for path in (made, *made.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def replace_file(file: Path, content: str) -> None:
    """Give a file new content, on the disk when this returns: all of it or none. Raises OSError."""
    with replacing(file) as made:
        made.write_text(content, encoding="utf-8")


def keep(file: Path, content: str) -> None:
    """Give a file of the cache new content, if it can be written."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)


def sha256(file: Path) -> str:
    """The digest of a file. Raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def kept_digest(file: Path) -> str:
    """The digest of a file: computed again once another one, or a change, has taken its place."""
    found = file.stat()
    times = found.st_mtime_ns, found.st_ctime_ns  # the latter has no setter
    decisive = repr((str(file.absolute()), found.st_ino, found.st_size, times))
    kept = cache_dir() / "digests" / digest(decisive.encode())
    with suppress(OSError, ValueError):
        known = kept.read_text()
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    made = sha256(file)
    keep(kept, made)
    return made
