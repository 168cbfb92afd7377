"""This machine: the engine as a process of its own, found again by a file in the cache."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import psutil

from peagle.catalog import flag_options
from peagle.deploy.spec import DeployFailed, Spec, new_key
from peagle.errors import InputError, first_line
from peagle.paths import cache_dir
from peagle.vllm.process import look

HOST = "127.0.0.1"
STOP_SECONDS = 60.0  # running answers are finished


@dataclass(frozen=True, slots=True)
class Running:
    """A process that serves a model; `started` tells it from a later one of the same number."""

    name: str
    pid: int
    started: float
    url: str
    key: str


def command(spec: Spec, port: int) -> list[str]:
    """The engine's command line here. Raises InputError when the engine is not installed."""
    if spec.engine == "vllm":
        look(Path(os.environ.get("PEAGLE_VLLM_PYTHON", sys.executable)))
        line = ["peagle", "serve", spec.name, "--engine", "vllm"]
        line += ["--host", HOST, "--port", str(port), *spec.head_options()]
        if spec.flags:
            line += ["--", *flag_options(spec.flags)]
    else:
        if shutil.which("nvidia-smi") is None:
            spec = replace(spec, gpus=0)
        line = spec.command(HOST, port)
    return [sys.executable, "-m", *line]


def start(spec: Spec, line: Sequence[str], port: int, wait_seconds: float) -> Running:
    """Start `line`, wait until it is healthy, and have it answer one question.

    A model that is running already is left as it is and returned. A process that ends, does not
    become healthy in time or gives no answer is ended, and DeployFailed shows its last lines.
    """
    before = find(spec.name)
    if before is not None:
        return before
    key = new_key()
    _folder(spec.name).mkdir(parents=True, exist_ok=True)
    with _log(spec.name).open("wb") as log:
        process = subprocess.Popen(
            list(line),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.env, spec.key_variable: key},
            start_new_session=True,  # a later Ctrl-C does not end it
        )
    started = psutil.Process(process.pid).create_time()
    running = Running(spec.name, process.pid, started, f"http://{HOST}:{port}", key)
    state = _state(spec.name)
    state.touch(mode=0o600)  # the key is in it
    state.write_text(json.dumps(asdict(running)))
    try:
        _wait_until_healthy(process, running, wait_seconds)
        _ask(running)
    except BaseException as error:
        _end(running)
        process.wait()
        state.unlink(missing_ok=True)
        if not isinstance(error, DeployFailed):
            raise
        last = "\n".join(logs(spec.name, 20))
        raise DeployFailed(f"{error}; its last lines:\n{last}") from error
    return running


def free_port(port: int) -> int:
    """`port`, or any that is free for 0. Raises InputError when somebody listens there."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError as error:
            raise InputError(f"port {port}: {error.strerror}; 0 is any that is free") from error
        return int(sock.getsockname()[1])


def find(name: str) -> Running | None:
    """The running process of a model; None when there is none."""
    try:
        running = Running(**json.loads(_state(name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return running if _alive(running) else None


def status(name: str) -> dict[str, Any]:
    """Whether it runs, and whether it is healthy."""
    running = find(name)
    if running is None:
        return {"name": name, "status": "not running"}
    state = "healthy" if _healthy(running) else "not healthy"
    return {"name": name, "status": state, "url": running.url, "pid": running.pid}


def logs(name: str, lines: int) -> list[str]:
    """The last lines it wrote; they stay until it is deleted."""
    try:
        return _log(name).read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def delete(name: str) -> bool:
    """Stop it, let it finish its answers, and forget it; False when it was not running."""
    running = find(name)
    if running is not None:
        _end(running)
    shutil.rmtree(_folder(name), ignore_errors=True)
    return running is not None


def _folder(name: str) -> Path:
    return cache_dir() / "deployments" / name.replace("/", "--")


def _state(name: str) -> Path:
    return _folder(name) / "state.json"


def _log(name: str) -> Path:
    return _folder(name) / "log"


def _alive(running: Running) -> bool:
    try:
        process = psutil.Process(running.pid)
        same = abs(process.create_time() - running.started) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(running: Running) -> None:
    """Ask it to end, then make it and what it started end."""
    if not _alive(running):
        return
    process = psutil.Process(running.pid)
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
    for each in alive:
        each.kill()


def _healthy(running: Running) -> bool:
    try:
        return httpx2.get(f"{running.url}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def _wait_until_healthy(
    process: subprocess.Popen[bytes], running: Running, wait_seconds: float
) -> None:
    until = time.monotonic() + wait_seconds
    while not _healthy(running):
        if process.poll() is not None:
            raise DeployFailed(f"{running.name} ended with code {process.returncode}")
        if time.monotonic() > until:
            raise DeployFailed(f"{running.name} was not healthy after {wait_seconds:.0f} s")
        time.sleep(0.2)


def _ask(running: Running) -> None:
    """One short answer, as a client asks for it."""
    body = {
        "model": running.name,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
    }
    headers = {"Authorization": f"Bearer {running.key}"}
    url = f"{running.url}/v1/chat/completions"
    try:
        reply = httpx2.post(url, json=body, headers=headers, timeout=300)
        reply.raise_for_status()
        reply.json()["choices"][0]["message"]["content"]
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise DeployFailed(f"{running.name} gave no answer: {first_line(error)}") from error
