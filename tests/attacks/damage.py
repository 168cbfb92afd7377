"""Ways to damage the files of a training run, and the expected error of each."""

import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NEWEST, OLDER, OLDEST = (f"step-{step:08d}" for step in (6, 4, 2))
WEIGHT = "lm_head.weight"

Damage = Callable[[Path], None]  # of a run's folder


def tree(folder: Path) -> dict[str, Any]:
    """Everything in a folder: contents and modes."""
    return {
        str(path.relative_to(folder)): (
            stat.filemode(path.lstat().st_mode),
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


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


def progress(**changes: Any) -> Damage:
    """Change fields of `progress.json`; None removes one."""

    def damage(run: Path) -> None:
        file = run / "checkpoints" / NEWEST / "progress.json"
        record = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the tensors of the newest checkpoint."""

    def damage(run: Path) -> None:
        file = run / "checkpoints" / NEWEST / "state.safetensors"
        loaded = load_file(file)
        change(loaded)
        save_file(loaded, file)

    return damage


def only(kind: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Keep the tensors of one kind."""

    def change(loaded: dict[str, torch.Tensor]) -> None:
        for name in [name for name in loaded if not name.startswith(kind)]:
            del loaded[name]

    return change


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
    "cut": (cut("progress.json", 0.6), CHANGED),
    "binary": (write("progress.json", b"\xff\xfe\x00\x80"), CHANGED),
    "nested": (write("progress.json", "[" * 100_000), CHANGED),
    "a list": (write("progress.json", "[3]"), CHANGED),
    "missing": (progress(stale=None), CHANGED),
    "unknown": (progress(foo=1), CHANGED),
    "another step": (progress(step=4), CHANGED),
    "seconds NaN": (progress(seconds=float("nan")), CHANGED),
}
STATE: dict[str, tuple[Damage, str]] = {
    "absent": (remove("state.safetensors"), UNREADABLE),
    "a folder": (folder_instead("state.safetensors"), UNREADABLE),
    "empty": (write("state.safetensors", b""), CHANGED),
    "cut by a byte": (cut("state.safetensors", 0.99999), CHANGED),
    "zeros": (write("state.safetensors", bytes(5000)), CHANGED),
    "no tensors": (tensors(dict.clear), CHANGED),
    "weights only": (tensors(only("weights/")), CHANGED),
    "weight missing": (tensors(lambda t: t.pop(f"weights/{WEIGHT}")), CHANGED),
    "weight of another type": (
        tensors(lambda t: t.update({f"weights/{WEIGHT}": torch.zeros(100, 32, dtype=torch.int8)})),
        CHANGED,
    ),
    "one value": (tensors(lambda t: t[f"weights/{WEIGHT}"][0, 0].add_(1.0)), CHANGED),
    "vocabulary": (tensors(lambda t: t["weights/d2t"].fill_(500)), CHANGED),
    "moment missing": (tensors(lambda t: t.pop(f"exp_avg/{WEIGHT}")), CHANGED),
    "moment of nothing": (tensors(lambda t: t.update({"exp_avg/other": torch.zeros(3)})), CHANGED),
}
SUMS: dict[str, tuple[Damage, str]] = {
    "absent": (remove("SHA256SUMS"), f"SHA256SUMS: {UNREADABLE}"),
    "empty": (write("SHA256SUMS", ""), f"progress.json: {CHANGED}"),
    "binary": (write("SHA256SUMS", b"\xff\xfe\x00\x80"), f"progress.json: {CHANGED}"),
}
