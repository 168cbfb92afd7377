"""JSON and JSONL files: read, written and changed."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def change_json(file: Path, **changes: object) -> None:
    """Set top-level keys; a value of None removes the key."""
    changed = read_json(file) | changes
    kept = {key: value for key, value in changed.items() if key not in changes or value is not None}
    file.write_text(json.dumps(kept))


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_lines(file: Path, *records: object) -> Path:
    """A line for each record; text is written as it is."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    file.write_text("".join(f"{line}\n" for line in lines))
    return file
