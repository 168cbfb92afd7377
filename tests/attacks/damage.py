"""Ways to damage the files of a training run, and what is to be said of each."""

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
    return content[:at] + (b"" if how == 2 else some) + kept


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


PROGRESS: dict[str, tuple[Damage, str]] = {
    "absent": (remove("progress.json"), "cannot be read"),
    "a folder": (folder_instead("progress.json"), "cannot be read"),
    "empty": (write("progress.json", ""), "cannot be read"),
    "cut": (cut("progress.json", 0.6), "cannot be read"),
    "binary": (write("progress.json", b"\xff\xfe\x00\x80"), "cannot be read"),
    "zeros": (write("progress.json", bytes(80)), "cannot be read"),
    "nested": (write("progress.json", "[" * 100_000), "cannot be read"),
    "a list": (write("progress.json", "[3]"), "expected a JSON object"),
    "a text": (write("progress.json", '"step"'), "expected a JSON object"),
    "no field": (write("progress.json", "{}"), "answer_tokens is missing"),
    "missing": (progress(stale=None), "stale is missing"),
    "unknown": (progress(foo=1), "'foo' is not known"),
    "unknown line": (progress(**{"a\nb": 1}), r"'a\nb' is not known"),
    "step text": (progress(step="six"), "step is 'six', expected a whole number"),
    "step text number": (progress(step="6"), "step is '6', expected a whole number"),
    "step float": (progress(step=6.0), "step is 6.0, expected a whole number"),
    "step bool": (progress(step=True), "step is True, expected a whole number"),
    "step negative": (progress(step=-6), "step is -6, expected a whole number from 0 on"),
    "step list": (progress(step=[6]), "step is [6], expected a whole number"),
    "step of another": (progress(step=4), "step is 4, and the folder is of step 6"),
    "step huge": (progress(step=10**30), "step is 1000000"),
    "seconds NaN": (progress(seconds=float("nan")), "seconds is nan, expected a number"),
    "seconds inf": (progress(seconds=float("inf")), "seconds is inf, expected a number"),
    "seconds 1e999": (write("progress.json", '{"seconds": 1e999}'), "answer_tokens is missing"),
    "seconds bool": (progress(seconds=True), "seconds is True, expected a number"),
    "seconds text": (progress(seconds="1"), "seconds is '1', expected a number"),
    "best negative": (progress(best_acceptance=-1.0), "best_acceptance is -1.0, expected a number"),
    "stale object": (progress(stale={}), "stale is {}, expected a whole number"),
}
STATE: dict[str, tuple[Damage, str]] = {
    "absent": (remove("state.safetensors"), "cannot be read"),
    "a folder": (folder_instead("state.safetensors"), "cannot be read"),
    "empty": (write("state.safetensors", b""), "cannot be read"),
    "cut": (cut("state.safetensors", 0.7), "cannot be read"),
    "cut by a byte": (cut("state.safetensors", 0.99999), "cannot be read"),
    "cut header": (cut("state.safetensors", 0.001), "cannot be read"),
    "zeros": (write("state.safetensors", bytes(5000)), "cannot be read"),
    "huge header": (write("state.safetensors", b"\xff" * 64), "cannot be read"),
    "text": (write("state.safetensors", "not a tensor\n" * 9), "cannot be read"),
    "no tensors": (tensors(dict.clear), "absent there and"),
    "weights only": (tensors(only("weights/")), "average/fc.weight is missing"),
    "weight missing": (tensors(lambda t: t.pop(f"weights/{WEIGHT}")), "absent there and"),
    "weight of another shape": (
        tensors(lambda t: t.update({f"weights/{WEIGHT}": torch.zeros(3)})),
        f"{WEIGHT} is [3] there and [100, 32] now",
    ),
    "weight of another type": (
        tensors(lambda t: t.update({f"weights/{WEIGHT}": torch.zeros(100, 32, dtype=torch.int8)})),
        f"weights/{WEIGHT} is torch.int8 [100, 32], expected torch.float32 [100, 32]",
    ),
    "weight NaN": (
        tensors(lambda t: t[f"weights/{WEIGHT}"][7].fill_(float("nan"))),
        f"weights/{WEIGHT} holds values that are not finite",
    ),
    "vocabulary": (
        tensors(lambda t: t["weights/d2t"].fill_(500)),
        "weights/d2t leads to token ids outside of 0 to 127",
    ),
    "vocabulary far": (
        tensors(lambda t: t["weights/d2t"].fill_(2**63 - 1)),
        "weights/d2t leads to token ids outside of 0 to 127",
    ),
    **{
        f"{kind} missing": (
            tensors(lambda t, kind=kind: t.pop(f"{kind}/{WEIGHT}")),
            f"{kind}/{WEIGHT} is missing",
        )
        for kind in ("exp_avg", "exp_avg_sq")
    },
    "both moments missing": (
        tensors(lambda t: [t.pop(f"{kind}/{WEIGHT}") for kind in ("exp_avg", "exp_avg_sq")]),
        f"exp_avg/{WEIGHT} is missing",
    ),
    "moment of another shape": (
        tensors(lambda t: t.update({f"exp_avg/{WEIGHT}": torch.zeros(32, 100)})),
        f"exp_avg/{WEIGHT} is torch.float32 [32, 100], expected torch.float32 [100, 32]",
    ),
    "moment infinite": (
        tensors(lambda t: t[f"exp_avg/{WEIGHT}"][0, 0].fill_(float("inf"))),
        f"exp_avg/{WEIGHT} holds values that are not finite",
    ),
    "moment negative": (
        tensors(lambda t: t[f"exp_avg_sq/{WEIGHT}"][0, 0].fill_(-1.0)),
        f"exp_avg_sq/{WEIGHT} holds negative values",
    ),
    "moment of nothing": (
        tensors(lambda t: t.update({"exp_avg/other": torch.zeros(3)})),
        "exp_avg/other is not part of this run",
    ),
}
