"""Compare two measurements row by row."""

import json
from pathlib import Path
from typing import Any

from peagle.bench.run import FORMAT
from peagle.bench.summary import Cell
from peagle.errors import InputError

Row = dict[str, Any]


def compare_files(before: Path, after: Path) -> list[Row]:
    """Rows of `after` that both have, each with its `change`, the `ratio` of throughput after ÷
    before, and that of `before`. Raises InputError when hardware or settings differ."""
    old = _read(before, "before")
    new = _read(after, "after")
    for name in sorted((old.keys() | new.keys()) - {"rows", "repeats"}):
        if old.get(name) != new.get(name):
            values = f"{name} {old.get(name)!r} in {before}, {new.get(name)!r} in {after}"
            raise InputError(f"not comparable: {values}")
    earlier = {Cell.from_row(row): row for row in old["rows"]}
    pairs = [(earlier.get(Cell.from_row(row)), row) for row in new["rows"]]
    changes = [_changed(was, row) for was, row in pairs if was is not None]
    if not changes:
        raise InputError(f"{before} and {after} have no row in common")
    return changes


def _changed(before: Row, after: Row) -> Row:
    """Slower or faster where the 95 % intervals do not overlap, else alike."""
    was = before["output_tps_95"]
    now = after["output_tps_95"]
    ratio = after["output_tps"] / before["output_tps"]
    change = "slower" if ratio < 1 else "faster"
    if was is None or now is None or (was[0] <= now[1] and now[0] <= was[1]):
        change = "alike"
    return after | {"before": before["output_tps"], "ratio": ratio, "change": change}


def _read(file: Path, field: str) -> dict[str, Any]:
    """The device, the settings and the rows of a report."""
    try:
        report = json.loads(file.read_text())
        version = report["format"]
        found = {**report["settings"], "device": report["device"], "rows": report["rows"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"not written by `peagle bench` ({error!r})"
        raise InputError(why, field=field, value=file) from error
    if version != FORMAT:
        why = f"format {version}, this version reads {FORMAT}"
        raise InputError(why, field=field, value=file)
    return found
