"""Two processes train as one; a run that is killed ten times ends where one that is not does."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from processes import RUN, run, start
from safetensors.torch import load_file
from torch import Tensor

from peagle.model.config import Method


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
def test_two_processes_equal_one(
    tmp_path: Path, method: Method, launch: Callable[..., None]
) -> None:
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


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    """SIGKILL at random moments, resumed each time: bit for bit the weights of a straight run."""
    settings = {"steps": 80, "save_every": 2, "eval_every": 20}
    run(tmp_path / "straight", **settings)
    kills, chance, folder = 0, random.Random(0), tmp_path / "killed"
    while not (folder / "done").exists():
        [process] = start(folder, **settings)
        if kills < 10:
            wait_for_progress(folder, process)
            time.sleep(chance.random() * 0.08)
            process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL)
    assert kills == 10, "it ended before it was killed often enough"
    straight, killed = weights(tmp_path / "straight"), weights(folder)
    assert straight.keys() == killed.keys()
    for name, tensor in straight.items():
        assert tensor.equal(killed[name]), name
    lines = [[{**m, "seconds": 0} for m in metrics(tmp_path / f)] for f in ("straight", "killed")]
    assert lines[0] == lines[1]


def wait_for_progress(folder: Path, process: BaseProcess) -> None:
    """Until it has taken a step since it was started."""
    file = folder / "metrics.jsonl"
    before = file.stat().st_size if file.exists() else 0
    while process.is_alive() and (not file.exists() or file.stat().st_size == before):
        time.sleep(0.01)
