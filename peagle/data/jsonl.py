"""Data files that grow a record at a time and survive being killed. One process writes one file."""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from peagle.errors import InputError
from peagle.files import unusable, writing

LINE_START = b'{"record": '
T = TypeVar("T")


def open_to_append(output: Path) -> BinaryIO:
    """Open a file, and make its folder when it is not there. No other process can open it so until
    it is closed, or this process ends. Raises InputError when another process has it open."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = output.open("a+b")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "another process is writing it"
        raise InputError(why, field="output", value=output, fix="name another file") from error
    except OSError as error:
        raise unusable(error, output) from error
    return file


def read_back(
    file: BinaryIO, command: str, parse: Callable[[dict[str, Any]], T]
) -> list[tuple[T, int]]:
    """Parse every line that a former run of `command` left in a file that `open_to_append` opened.
    Returns a parsed value and the line's first byte for each.

    A last line that a kill cut short is removed from the file. Raises InputError, and leaves the
    file as it is, when `parse` raises LookupError, TypeError or ValueError.
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
            why = f"not written by `peagle data {command}`"
            at = Path(f"{file.name}:{number}")
            fix = "name another file"
            raise InputError(why, field="output", value=at, fix=fix) from error
        size += len(line)
    file.truncate(size)
    return found


def append(file: BinaryIO, lines: Iterable[dict[str, Any]]) -> None:
    """Write lines and wait until the disk has them. Raises InputError, and leaves the file as it
    was, where the disk refuses."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    left = memoryview(text.encode())
    size = os.fstat(file.fileno()).st_size
    with writing(Path(file.name)):
        try:
            while left:  # not through the buffer, which would try again when it is closed
                left = left[os.write(file.fileno(), left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
