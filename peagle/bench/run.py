"""Cells of a measurement, its JSON file, and the comparison of two."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peagle.bench.summary import Cell, Result, row
from peagle.catalog import CHOICES, PARALLEL_METHODS
from peagle.engine.drafting import Drafting
from peagle.errors import InputError
from peagle.files import replace_file, writing

FORMAT = 1
Row = dict[str, Any]


def make_cells(
    methods: Sequence[str],
    settings: Sequence[Drafting],
    loads: Sequence[int],
    temperatures: Sequence[float],
) -> list[Cell]:
    """Every method with every setting (whose method is left open) under every load, at every
    temperature."""
    if wrong := [method for method in methods if method not in CHOICES]:
        raise InputError(f"choose from {', '.join(CHOICES)}", field="methods", value=wrong[0])
    return [
        Cell(replace(setting, method=method), load, temperature)
        for temperature in temperatures
        for load in loads
        for method in dict.fromkeys(methods)
        for setting in _possible(method, settings)
    ]


def _possible(method: str, settings: Sequence[Drafting]) -> Sequence[Drafting]:
    """The settings that a method can draft with; all, to be refused, where it can with none."""
    if method == "none":
        return [Drafting()]
    if method == "lookup":
        trees = [replace(one, lookup=True) for one in settings if one.nodes]
        return trees or [Drafting("", None, lookup=True)]
    if method in PARALLEL_METHODS:
        return settings
    return [setting for setting in settings if setting.lookup or not setting.nodes] or settings


def report(results: list[Result], about: dict[str, Any]) -> dict[str, Any]:
    """The JSON file: `about` (device, versions, settings), then a row for each cell played."""
    complete = all(len(result.repeats) == about["settings"]["repeats"] for result in results)
    played = [result for result in results if result.repeats]
    alone = {result.cell.load: result for result in played if result.cell.drafting.k == 0}
    rows = [row(result, alone.get(result.cell.load)) for result in played]
    return {"format": FORMAT, "complete": complete, **about, "rows": rows}


def environment(device: str) -> dict[str, Any]:
    """Device, versions and commit, as the JSON files have them."""
    versions = {"python": platform.python_version()}
    for package in ("peagle", "torch", "transformers", "vllm"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"device": device, "versions": versions, "git_commit": _commit()}


def _commit() -> str | None:
    """The commit of this clone, with a + where it was changed; None outside of one, also where the
    package is installed inside another repository."""
    clone = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty=+", "--abbrev=12"]
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(clone.parent)}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, env=environ, capture_output=True, timeout=10, check=True)
        return done.stdout.decode().strip()
    return None


def write_json(file: Path, report: dict[str, Any]) -> None:
    """Replace a file in one step. Raises InputError where it cannot be written."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(report, indent=1) + "\n")


def compare_files(before: Path, after: Path) -> list[Row]:
    """Rows of `after` that both have, each with its `change`, the `ratio` of throughput after ÷
    before, and that of `before`. Raises InputError when hardware or settings differ."""
    old = _read(before, "before")
    new = _read(after, "after")
    for name in sorted((old.keys() | new.keys()) - {"rows", "repeats"}):
        if old.get(name) != new.get(name):
            values = f"{name} {old.get(name)!r} in {before}, {new.get(name)!r} in {after}"
            raise InputError(f"not comparable: {values}")
    for file, found in ((before, old), (after, new)):
        if why := next((row["error"] for row in found["rows"] if row["errors"]), None):
            raise InputError(f"not comparable: requests failed in {file}: {why}")
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
        raise InputError(f"format {version}, this version reads {FORMAT}", field=field, value=file)
    return found
