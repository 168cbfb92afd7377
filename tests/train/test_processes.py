"""Two processes train as one. (Runs that are killed: attacks/test_killed_training.py.)"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import RUN, run
from safetensors.torch import load_file
from torch import Tensor


def weights(folder: Path) -> dict[str, Tensor]:
    newest = max((folder / "checkpoints").iterdir())
    return load_file(newest / "state.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def torchrun(folder: Path, processes: int, **settings: Any) -> None:
    """A run as users start it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*launch, str(processes), str(RUN), str(folder), json.dumps(settings)],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "launch"), [("p-eagle", torchrun), ("eagle3", run)])
def test_two_processes_equal_one(tmp_path: Path, method: str, launch: Callable[..., None]) -> None:
    """Same global batch, partitioned differently often a process: same losses, same weights."""
    settings = {"method": method, "steps": 5, "batch": 4, "pack": 60, "segments": 3, "bf16": False}
    run(tmp_path / "1", **settings)
    launch(tmp_path / "2", 2, **settings)
    one, two = (metrics(tmp_path / str(count)) for count in (1, 2))
    assert [m["step"] for m in two] == [1, 2, 3, 4, 5], "process 0 alone writes"
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-3)
        assert (a["answer_tokens"], a["accuracy"]) == (b["answer_tokens"], b["accuracy"])
    first, second = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name, tensor in first.items():
        assert (tensor.double() - second[name].double()).norm() <= 1e-3 * (
            1e-6 + tensor.double().norm()
        ), name
