"""Compare two measurements row by row."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from peagle.bench.run import FORMAT
from peagle.bench.summary import Cell
from peagle.errors import InputError

Row = dict[str, Any]


class Change(NamedTuple):
    """One row, before and after."""

    cell: Cell
    before: Row
    after: Row

    @property
    def ratio(self) -> float:
        """Throughput after ÷ before."""
        return float(self.after["output_tps"] / self.before["output_tps"])

    @property
    def verdict(self) -> str:
        """Slower or faster where the 95 % intervals do not overlap, else alike."""
        was = self.before["output_tps_95"]
        now = self.after["output_tps_95"]
        if was is None or now is None or (was[0] <= now[1] and now[0] <= was[1]):
            return "alike"
        return "slower" if self.ratio < 1 else "faster"


def compare_files(before: Path, after: Path) -> list[Change]:
    """Rows that both have. Raises InputError when hardware or settings differ."""
    old = _read(before, "before")
    new = _read(after, "after")
    for name in sorted((old.keys() | new.keys()) - {"rows", "repeats"}):
        if old.get(name) != new.get(name):
            values = f"{name} {old.get(name)!r} in {before}, {new.get(name)!r} in {after}"
            raise InputError(f"not comparable: {values}")
    earlier = {Cell.from_row(row): row for row in old["rows"]}
    later = {Cell.from_row(row): row for row in new["rows"]}
    changes = [Change(cell, earlier[cell], row) for cell, row in later.items() if cell in earlier]
    if not changes:
        raise InputError(f"{before} and {after} have no row in common")
    return changes


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
