"""Processes of `run_training.py`, forked from one that has imported torch: they start at once."""

import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

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
