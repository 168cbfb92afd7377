"""Data files that grow a record at a time and survive being killed. One process writes one file."""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from peagle.errors import InputError

LINE_START = b'{"record": '
T = TypeVar("T")


def open_to_append(output: Path) -> BinaryIO:
    """The file, in a folder that is made when it is not there; nobody else can open it so until it
    is closed, or this process ends. Raises InputError when somebody has it open."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = output.open("a+b")
    except OSError as error:
        raise InputError(f"output {output}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        busy = isinstance(error, BlockingIOError)
        why = "another process is writing it: name another file" if busy else error.strerror
        raise InputError(f"output {output}: {why}") from error
    return file


def read_back(
    file: BinaryIO, command: str, parse: Callable[[dict[str, Any]], T]
) -> list[tuple[T, int]]:
    """What `parse` makes of every line a former run of `command` left in a file that
    `open_to_append` opened, and the byte it begins at.

    A last line that a kill cut short is removed from the file. Raises InputError, and leaves the
    file as it is, when `parse` raises LookupError, TypeError or ValueError: it is not ours.
    """
    found: list[tuple[T, int]] = []
    size = 0
    file.seek(0)
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n") and LINE_START.startswith(line[: len(LINE_START)]):
            break
        try:
            found.append((parse(json.loads(line)), size))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            why = f"not written by `peagle data {command}`: name another file"
            raise InputError(f"output {file.name}:{number}: {why}") from error
        size += len(line)
    file.truncate(size)
    return found


def append(file: BinaryIO, lines: Iterable[dict[str, Any]]) -> None:
    """Write lines and wait until the disk has them."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.write(text.encode())
    file.flush()
    os.fsync(file.fileno())
