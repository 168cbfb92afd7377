"""vLLM on this machine as a server: one after another, with a method and K each."""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2 as httpx

from peagle.vllm.process import Process, VllmFailed

HOST = "127.0.0.1"
START_SECONDS = 900.0  # for loading weights and compiling


@contextmanager
def serving(options: list[str], python: Path | None) -> Iterator[str]:
    """Yield the base URL of `peagle serve --engine vllm` with these options.

    `python` is the interpreter that has vLLM. Raises VllmFailed, with the last line of its log,
    when it ends or does not answer.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = f"{HOST}:{free.getsockname()[1]}"
    where = ["--engine", "vllm", "--host", HOST, "--port", address.partition(":")[2]]
    if python is not None:
        where += ["--vllm-python", str(python)]
    command = [sys.executable, "-m", "peagle", "serve", *where, *options]
    environ = {**os.environ, "PEAGLE_API_KEY": ""}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "vllm.log")
        with closing(Process(command, environ, log, server=True)) as process:
            _wait(process, f"http://{address}/health")
            yield f"http://{address}/v1"


def _wait(process: Process, health: str) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.child.poll() is not None:
            raise process.failure()
        try:
            if httpx.get(health, timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise VllmFailed(f"vLLM did not answer within {START_SECONDS:.0f} s")
