"""A victim (victim.py), ways to look at it, and a neighbour: a client who only wants answers."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil

LONG = os.environ.get("PEAGLE_ATTACKS") == "long"
VICTIM = Path(__file__).with_name("victim.py")
PATIENCE = 60  # seconds: what takes longer hangs


class Victim:
    """A server in a process of its own."""

    def __init__(self, *options: str) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(VICTIM), *options],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE)
        for _ in range(600):
            if self.healthy():
                return
            time.sleep(0.05)
        raise AssertionError("the server does not start")

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def answers(self) -> bool:
        """Whether a plain request still gets its answer."""
        body = {"prompt": "the cat", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        got = self.http.post("/v1/completions", json=body)
        return got.status_code == 200 and got.json()["usage"]["completion_tokens"] == 4

    def memory(self) -> int:
        """Bytes of RAM it takes, its children's included."""
        main = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in [main, *main.children(recursive=True)])

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()


class Neighbour:
    """Streams one answer after another and notes the longest wait for a token, in seconds."""

    def __init__(self, victim: Victim) -> None:
        self.worst, self.failures, self._over = 0.0, list[str](), threading.Event()
        self._http = httpx2.Client(base_url=victim.url, timeout=PATIENCE)
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        body = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True, "stream": True}
        while not self._over.is_set():
            last = time.monotonic()
            try:
                with self._http.stream("POST", "/v1/completions", json=body) as got:
                    for line in got.iter_lines():
                        if line.startswith("data:"):
                            now = time.monotonic()
                            self.worst = max(self.worst, now - last)
                            last = now
            except httpx2.TransportError as error:
                self.failures.append(repr(error))
                return

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask while the block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join(PATIENCE)
            self._http.close()
