"""Processes of `run_training.py`, forked from one that has imported torch: they start at once."""

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from json_files import read_lines
from safetensors.torch import load_file
from torch import Tensor

from peagle.train.state import checkpoints

RUN = Path(__file__).with_name("run_training.py")


def start(folder: Path, processes: int = 1, **settings: Any) -> list[BaseProcess]:
    """Begin a run; several processes have the environment that torchrun gives them."""
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started: list[BaseProcess] = []
    for rank in map(str, range(processes)):
        own = shared | {"RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
        started.append(forked(_run, folder, settings, own))
    return started


def forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Begin a function in a process of its own."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["peagle.train.trainer"])
    process = forks.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def run(folder: Path, processes: int = 1, **settings: Any) -> None:
    """A whole run, which must end well."""
    started = start(folder, processes, **settings)
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * processes


def _run(folder: Path, settings: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv = [str(RUN), str(folder), json.dumps(settings)]
    runpy.run_path(str(RUN), run_name="__main__")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(folder: Path, processes: int, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A run as users start it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*launch, str(processes), str(RUN), str(folder), json.dumps(settings)],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All steps, without their times."""
    return [{**line, "seconds": 0} for line in read_lines(folder / "metrics.jsonl")]


def state(folder: Path) -> dict[str, Tensor]:
    """Weights and moments of the newest checkpoint."""
    return load_file(checkpoints(folder)[-1] / "state.safetensors")


def assert_near(one: dict[str, Tensor], other: dict[str, Tensor], within: float = 1e-3) -> None:
    """Within rounding."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        off = (tensor.double() - other[name].double()).norm()
        assert off <= within * (1e-6 + tensor.double().norm()), name
