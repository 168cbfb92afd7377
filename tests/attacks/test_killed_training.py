"""A training run that is killed at random moments, and resumed each time, ends where an undisturbed
one does, bit for bit."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from peagle.train.state import checkpoints

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
from processes import metrics, run, start, state

KILLS = 25 if os.environ.get("PEAGLE_ATTACKS") == "long" else 4
SETTINGS: dict[str, Any] = {"steps": 20 + 8 * KILLS, "save_every": 2, "eval_every": 10}
PATIENCE = 120  # seconds that a process has to take a step


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_kills_change_nothing(tmp_path: Path, method: str, count: Callable[..., None]) -> None:
    straight, folder, settings = tmp_path / "straight", tmp_path / "killed", SETTINGS
    run(straight, **settings, method=method)
    kills, resumed, chance = 0, 0, random.Random(method)
    while not (folder / "done").exists():
        resumed += bool(checkpoints(folder))
        [process] = start(folder, **settings, method=method)
        if kills < KILLS:
            wait(folder, process, chance)
            process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode == -signal.SIGKILL
    assert kills == KILLS and resumed > 0, "it ended before it was killed often enough"
    wanted, found = state(straight), state(folder)
    assert wanted.keys() == found.keys()
    assert all(tensor.equal(found[name]) for name, tensor in wanted.items())
    assert metrics(straight) == metrics(folder)
    count("kills of training; weights as without them", kills)


def wait(folder: Path, process: BaseProcess, chance: random.Random) -> None:
    """Until some moment while it starts, or while it makes a checkpoint and the next steps."""
    if chance.random() < 0.25:
        time.sleep(chance.random())
        return
    newest, end = checkpoints(folder)[-1:], time.monotonic() + PATIENCE
    while process.is_alive() and checkpoints(folder)[-1:] == newest and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(chance.random() * 0.15)
