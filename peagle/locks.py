"""Files and folders that one process at a time may write."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from peagle.errors import InputError


def hold(opened: BinaryIO | int, output: Path) -> None:
    """Let no other process hold an open file or folder, until it is closed or this process ends.
    Raises OSError, and InputError when another one holds it."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "another process is writing it"
        raise InputError(why, field="output", value=output, fix="name another path") from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder that exists; see `hold`."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        hold(opened, folder)
        yield
    finally:
        os.close(opened)
