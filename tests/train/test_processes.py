"""Two processes train as one; a run that is killed ten times ends where one that is not does."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

RUN = Path(__file__).with_name("run_training.py")


def command(folder: Path, **settings: Any) -> list[str]:
    return [str(RUN), str(folder), json.dumps(settings)]


def weights(folder: Path) -> dict[str, Tensor]:
    newest = max((folder / "checkpoints").iterdir())
    return load_file(newest / "state.safetensors")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_two_processes_equal_one(tmp_path: Path, method: str) -> None:
    """Same global batch, partitioned differently often a process: same losses, same weights."""
    settings = {"method": method, "steps": 5, "batch": 4, "pack": 60, "segments": 3, "bf16": False}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for count in (1, 2):
        folder = tmp_path / str(count)
        done = subprocess.run(
            [*launch, str(count), *command(folder, **settings)],
            capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
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
    settings = {"steps": 120, "save_every": 3, "eval_every": 25}
    subprocess.run([sys.executable, *command(tmp_path / "straight", **settings)], check=True)
    kills, chance, folder = 0, random.Random(0), tmp_path / "killed"
    while not (folder / "done").exists():
        process = subprocess.Popen([sys.executable, *command(folder, **settings)])
        if kills < 10:
            wait_for_progress(folder, process)
            time.sleep(chance.random() * 0.3)
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
        else:
            assert process.wait() == 0
    assert kills == 10, "it ended before it was killed often enough"
    straight, killed = weights(tmp_path / "straight"), weights(folder)
    assert straight.keys() == killed.keys()
    for name, tensor in straight.items():
        assert tensor.equal(killed[name]), name
    lines = [[{**m, "seconds": 0} for m in metrics(tmp_path / f)] for f in ("straight", "killed")]
    assert lines[0] == lines[1]


def wait_for_progress(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Until it has taken a step since it was started."""
    file = folder / "metrics.jsonl"
    before = file.stat().st_size if file.exists() else 0
    while process.poll() is None and (not file.exists() or file.stat().st_size == before):
        time.sleep(0.02)
