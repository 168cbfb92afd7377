"""Records of data files: read from JSONL files (plain or .gz), Parquet files and datasets of the
hub; appended to a JSONL file one at a time, which survives a kill. One process writes one file."""

import gzip
import json
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from peagle.errors import InputError, InputWarning, first_line
from peagle.files import writing
from peagle.locks import hold

MAX_UNUSABLE = 0.05  # share of the records
SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".txt")  # of files, never of a dataset's name
LINE_START = b'{"record": '  # of a file that is appended to
T = TypeVar("T")


class NoAnswer(InputError):
    """An error of a record without an answer within the maximum length of documents."""


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL file, or the rows of a Parquet file or of a dataset of the
    hub, owner/name[/config[/split]]. Raises InputError with file and line number."""
    path = Path(path)
    if not path.is_file():
        yield from _hub_rows(path)
        return
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        line_name = Path(f"{path}:{number}")  # as editors and compilers write it
        fix = "give one JSON object a line: jq -c '.[]' FILE" if line.startswith(b"[") else None
        try:
            record = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            why = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
            raise InputError(f"not JSON ({why})", value=line_name, fix=fix) from error
        except (ValueError, RecursionError) as error:  # not UTF-8, too many digits or levels
            raise InputError(f"not JSON ({first_line(error)})", value=line_name) from error
        if not isinstance(record, dict):
            found = type(record).__name__
            raise InputError(f"expected a JSON object, found {found}", value=line_name, fix=fix)
        yield record


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 (an extra)
    except ImportError as error:
        fix = "pip install 'peagle[bench]'"
        raise InputError("pyarrow is not installed", value=path, fix=fix) from error
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(f"cannot be read ({first_line(error)})", value=path) from error


def is_hub_name(path: Path) -> bool:
    """Return whether a path that is no file may be owner/name[/config[/split]]."""
    named = path.parts[:1] not in [("/",), ("..",)] and path.suffix not in SUFFIXES
    return named and 2 <= len(path.parts) <= 4


def _hub_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a dataset, as they come; its own code is never run."""
    if not is_hub_name(path):
        raise InputError("no such data file", value=path)
    owner, name, config, split = (*path.parts, None, None)[:4]
    try:
        from datasets import load_dataset  # noqa: PLC0415 (an extra)
    except ImportError as error:
        why = "no such file, and datasets, which reads the hub, is not installed"
        raise InputError(why, value=path, fix="pip install 'peagle[data]'") from error
    try:
        yield from load_dataset(f"{owner}/{name}", config, split=split or "train", streaming=True)
    except Exception as error:  # of any library below: the network's, the hub's, a format's
        why = f"cannot be read from the hub ({first_line(error)})"
        fix = "name owner/name[/config[/split]], or a file"
        raise InputError(why, value=path, fix=fix) from error


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot be read ({error})", value=path) from error


def usable(
    path: str | Path, parse: Callable[[dict[str, Any]], T], strict: bool, limit: int | None = None
) -> Iterator[T | None]:
    """Parse the records of a file, at most `limit`; a record for which `parse` raises InputError
    gives None. An InputWarning counts these by reason, at the end.

    Raises InputError for an empty file, for one of which nothing or less than 95 % can be used
    (NoAnswer is no fault), and, `strict`, for the first record that cannot.
    """
    reasons = Counter[str]()  # errors that differ in values have one
    examples: dict[str, str] = {}
    number = 0
    wrong = 0
    for number, record in enumerate(islice(read_records(path), limit), start=1):
        try:
            yield parse(record)
        except InputError as error:
            text = f"record {number}: {error}"
            faulty = not isinstance(error, NoAnswer)
            if strict and faulty:
                raise InputError(text, value=Path(path)) from error
            wrong += faulty
            reasons[error.why] += 1
            examples.setdefault(error.why, text)
            yield None
    if not number:
        raise InputError("no records: the file is empty", value=Path(path))
    lost = reasons.total()
    each = "; ".join(f"{count} × {examples[why]}" for why, count in reasons.items())
    why = f"{lost} of {number} records cannot be used ({each})"
    if wrong > MAX_UNUSABLE * number or lost == number:
        raise InputError(why, value=Path(path))
    if lost:
        warnings.warn(f"{path}: {why}: they are left out", InputWarning, stacklevel=2)


def check_plain(output: Path) -> None:
    """Raises InputError for a file that `read_records` would not read as plain JSON lines."""
    if output.suffix in (".gz", ".parquet"):
        why = "is written as plain JSON lines"
        raise InputError(why, field="output", value=output, fix="name a .jsonl file")


def open_to_append(output: Path) -> BinaryIO:
    """Open a file, and make its folder when it is not there. No other process can open it so until
    it is closed, or this process ends. Raises InputError when another process has it open."""
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        file = output.open("a+b")
        hold(file, output)
    return file


def read_back(
    file: BinaryIO, command: str, parse: Callable[[dict[str, Any]], T]
) -> list[tuple[T, int]]:
    """Parse every line that a former run of `command` left in a file that `open_to_append` opened.
    Returns a parsed value and the line's first byte for each.

    A last line that a kill cut short is removed from the file. Raises InputError, and leaves the
    file as it is, when `parse` raises LookupError, TypeError or ValueError; for the reason of an
    InputError.
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
            why = getattr(error, "why", f"not written by `peagle data {command}`")
            at = Path(f"{file.name}:{number}")
            raise InputError(why, field="output", value=at, fix="name another file") from error
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
