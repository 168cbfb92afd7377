"""Data files that grow a record at a time and survive being killed."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from peagle.config import InputError

LINE_START = b'{"record": '
T = TypeVar("T")


def read_back(
    output: Path, command: str, parse: Callable[[dict[str, Any]], T]
) -> list[tuple[T, int]]:
    """What `parse` makes of every line a former run of `command` left, and the byte it begins at.

    A last line that a kill cut short is removed from the file. Raises InputError, and leaves the
    file as it is, when `parse` raises LookupError, TypeError or ValueError: it is not ours.
    """
    if not output.is_file():
        return []
    found: list[tuple[T, int]] = []
    size = 0
    with output.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and LINE_START.startswith(line[: len(LINE_START)]):
                break
            try:
                found.append((parse(json.loads(line)), size))
            except (ValueError, LookupError, TypeError) as error:
                why = f"not written by `peagle data {command}`: name another file"
                raise InputError(f"--output {output}:{number}: {why}") from error
            size += len(line)
    os.truncate(output, size)
    return found


def open_to_append(output: Path) -> BinaryIO:
    """The file, in a folder that is made when it is not there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return output.open("ab")
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}") from error


def append(file: BinaryIO, lines: Iterable[dict[str, Any]]) -> None:
    """Write lines and wait until the disk has them."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.write(text.encode())
    file.flush()
    os.fsync(file.fileno())
