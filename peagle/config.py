"""What every layer shares: the error and the warning users see, and where files are kept."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Something the user gave is wrong; the message names it and says what to do (exit code 2)."""


class InputWarning(UserWarning):
    """Something the user gave works, and will not do them good; the message says why."""


def first_line(error: Exception) -> str:
    """The first line of an error's text: what a person needs of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(text: str, most: int = 60) -> str:
    """A text as it is shown: of a long one the beginning, `most` characters with its dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def cache_dir() -> Path:
    """Folder for what peagle makes once and keeps: `$PEAGLE_HOME`, else `~/.cache/peagle`."""
    return Path(os.environ.get("PEAGLE_HOME", Path.home() / ".cache" / "peagle"))


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the warnings of each attempt to reach the hub: the error at the end says why."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
