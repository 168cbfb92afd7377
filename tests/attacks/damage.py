"""Ways to damage the files of a training run, and the expected error of each."""

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEWEST, OLDER, OLDEST = (f"step-{step:08d}" for step in (6, 4, 2))

Damage = Callable[[Path], None]  # of a run's folder


def tree(folder: Path) -> dict[str, Any]:
    """Everything in a folder: contents and modes."""
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = stat.filemode(path.lstat().st_mode), content
    return found


def garbled(content: bytes, chance: random.Random) -> bytes:
    """Content with one thing wrong, more often near its beginning."""
    at = int(len(content) * chance.random() ** 6)
    size = chance.choice([1, 1, 8, 200])
    some = bytes(chance.randrange(256) for _ in range(size))
    if (how := chance.randrange(4)) == 0:
        return content[:at]
    kept = content[at:] if how == 1 else content[at + size :]
    made = content[:at] + (b"" if how == 2 else some) + kept
    return made if made != content else garbled(content, chance)


def write(name: str, content: str | bytes) -> Damage:
    """Replace a file of the newest checkpoint."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda run: (run / "checkpoints" / NEWEST / name).write_bytes(raw) and None


def cut(name: str, share: float) -> Damage:
    """Keep the beginning of a file."""

    def damage(run: Path) -> None:
        file = run / "checkpoints" / NEWEST / name
        os.truncate(file, int(file.stat().st_size * share))

    return damage


def remove(name: str) -> Damage:
    return lambda run: (run / "checkpoints" / NEWEST / name).unlink()


def folder_instead(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / "checkpoints" / NEWEST / name).unlink()
        (run / "checkpoints" / NEWEST / name).mkdir()

    return damage


UNREADABLE, CHANGED = "cannot be read", "damaged (its checksum is not that in SHA256SUMS)"
PROGRESS: dict[str, tuple[Damage, str]] = {
    "absent": (remove("progress.json"), UNREADABLE),
    "a folder": (folder_instead("progress.json"), UNREADABLE),
    "empty": (write("progress.json", ""), CHANGED),
    "binary": (write("progress.json", b"\xff\xfe\x00\x80"), CHANGED),
    "nested": (write("progress.json", "[" * 100_000), CHANGED),
}
STATE: dict[str, tuple[Damage, str]] = {
    "absent": (remove("state.safetensors"), UNREADABLE),
    "a folder": (folder_instead("state.safetensors"), UNREADABLE),
    "empty": (write("state.safetensors", b""), CHANGED),
    "cut by a byte": (cut("state.safetensors", 0.99999), CHANGED),
    "zeros": (write("state.safetensors", bytes(5000)), CHANGED),
}
SUMS: dict[str, tuple[Damage, str]] = {
    "absent": (remove("SHA256SUMS"), f"SHA256SUMS: {UNREADABLE}"),
    "empty": (write("SHA256SUMS", ""), f"progress.json: {CHANGED}"),
    "binary": (write("SHA256SUMS", b"\xff\xfe\x00\x80"), f"progress.json: {CHANGED}"),
}
