"""Bad input is refused: the error is an InputError in one line, of the field that is wrong.

tests/errors.txt has the lines of all errors that tests provoke, with placeholders.
PEAGLE_ERRORS=write adds missing ones; to drop old ones, delete the file and run all tests so.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from peagle.cli.main import main
from peagle.errors import InputError

PYTHON = (3, 11)  # some lines have its own words, which other versions change
TEXTS = Path(__file__).with_name("errors.txt")
# Parts of a line that differ between machines and runs.
VARIABLE = {
    r"(?<![\w.:/])'?/(?!v1/)[^\s:;,'\"()]+'?": "<path>",  # a long one may lack its second quote
    r"(?<=\btarget)\d+|(?<=\bother)\d+|\d+(?= records are left)|\d+(?= were answered)": "<n>",
    r"(?<=port )\d+|(?<=', )\d+(?=\))": "<port>",
    r"127\.0\.0\.1:\d+": "<address>",
    r"\b[0-9a-f]{12,}\b": "<hash>",
    r"'[^']+, \d+ of \d+ cores'": "'<processor>'",
    r"[\d.]+(?= ([KMG]i?)?B\b)|\d+(?= bytes)|(?<=give at most )\d{6,}": "<size>",
}


@contextmanager
def refused(field: str | None = None) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expect an InputError of `field`; None: of no single one."""
    with pytest.raises(InputError) as found:
        yield found
    assert found.value.field == field
    check_text(str(found.value))


def refused_command(
    capsys: pytest.CaptureFixture[str], *args: object, field: str | None = None
) -> str:
    """Run `peagle …`, which must end with code 2 and one line on stderr, of `field` where one is
    given; return that line."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["peagle", *map(str, args)])
        main()
    out, line = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), line
    assert line.startswith("peagle: ")
    check_text(line)
    if field is not None:
        error = ended.value.__context__
        assert isinstance(error, InputError)
        assert error.field == field, line
    return line.strip()


def check_text(error: str) -> None:
    """Assert that an error is one line, and one of tests/errors.txt."""
    [line] = error.splitlines()
    if sys.version_info[:2] != PYTHON:
        return
    line = line.rstrip()
    for pattern, placeholder in VARIABLE.items():
        line = re.sub(pattern, placeholder, line)
    if os.environ.get("PEAGLE_ERRORS") == "write":
        _add(line)
    assert line in TEXTS.read_text().splitlines(), "new: run with PEAGLE_ERRORS=write"


def _add(line: str) -> None:
    with TEXTS.open("a+") as file:
        flock(file, LOCK_EX)  # tests run in several processes
        file.seek(0)
        lines = {*file.read().splitlines(), line}
        file.truncate(0)
        file.writelines(f"{each}\n" for each in sorted(lines))
