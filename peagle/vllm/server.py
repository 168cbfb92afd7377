"""vLLM on this machine: one server after another, a method and K each."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx2 as httpx

from peagle.vllm.process import VllmFailed

HOST = "127.0.0.1"
PATIENCE = 900.0  # seconds until it answers: weights, compilation


@contextmanager
def serving(options: list[str], python: Path | None) -> Iterator[str]:
    """The base URL of `peagle serve --engine vllm` with these options (target, head, method, K).

    Raises VllmFailed, with the last line of its log, when it ends or does not answer.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    interpreter = ["--vllm-python", str(python)] if python else []
    line = [sys.executable, "-m", "peagle", "serve", "--engine", "vllm", *interpreter]
    environ = {**os.environ, "PEAGLE_API_KEY": ""}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*line, "--host", HOST, "--port", str(port), *options],
            stdout=log, stderr=log, env=environ,
        )  # fmt: skip
        try:
            _wait(process, f"http://{HOST}:{port}/health", log)
            yield f"http://{HOST}:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], health: str, log: IO[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            log.seek(0)
            said = [text for text in log.read().decode(errors="replace").splitlines() if text]
            raise VllmFailed(
                f"vLLM ended with code {process.returncode}: {said[-1] if said else ''}"
            )
        try:
            if httpx.get(health, timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise VllmFailed(f"vLLM did not answer within {PATIENCE:.0f} s")
