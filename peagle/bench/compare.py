"""Two measurements of the same thing: what has become slower or faster."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.bench.run import FORMAT
from peagle.errors import InputError

KEYS = ("method", "k", "concurrency", "temperature")


@dataclass(frozen=True, slots=True)
class Change:
    """One row, before and after."""

    key: tuple[Any, ...]  # method, K, concurrency, temperature
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Times the throughput before."""
        return float(self.after["output_tps"] / self.before["output_tps"])

    @property
    def apart(self) -> bool:
        """Whether the 95 % intervals do not overlap."""
        spans = self.before["output_tps_95"], self.after["output_tps_95"]
        if None in spans:
            return False
        (low, high), (other_low, other_high) = spans
        return bool(low > other_high or other_low > high)

    @property
    def slower(self) -> bool:
        """Beyond noise."""
        return self.apart and self.ratio < 1

    def row(self) -> list[str]:
        """For a table."""
        method, k, concurrency, temperature = self.key
        word = ("slower" if self.ratio < 1 else "faster") if self.apart else "alike"
        return [
            method,
            str(k or "-"),
            f"c = {concurrency}" if concurrency else "random",
            f"{temperature:g}",
            f"{self.before['output_tps']:.1f}",
            f"{self.after['output_tps']:.1f}",
            f"{self.ratio:.2f}",
            word,
        ]


def compare_files(before: Path, after: Path) -> list[Change]:
    """Rows that both have. Raises InputError when they were measured otherwise than each other: on
    other hardware, or with other settings."""
    old, new = (_read(file) for file in (before, after))
    differing = {
        name: (old["settings"].get(name), new["settings"].get(name))
        for name in old["settings"].keys() | new["settings"].keys()
        if old["settings"].get(name) != new["settings"].get(name)
    }
    if old["device"] != new["device"]:
        differing = {"device": (old["device"], new["device"])}
    for name, (mine, theirs) in sorted(differing.items()):
        if name != "repeats":
            raise InputError(f"{name} {mine!r} in {before}, {theirs!r} in {after}: not comparable")
    rows = {tuple(row[key] for key in KEYS): row for row in old["rows"]}
    pairs = [(tuple(row[key] for key in KEYS), row) for row in new["rows"]]
    found = [Change(key, rows[key], row) for key, row in pairs if key in rows]
    if not found:
        raise InputError(f"{before} and {after} have no row in common")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        report = json.loads(file.read_text())
        if report["format"] != FORMAT:
            raise InputError(f"{file}: format {report['format']}, this version reads {FORMAT}")
        return {name: report[name] for name in ("device", "settings", "rows")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{file}: not what `peagle bench` writes ({error!r})") from error
