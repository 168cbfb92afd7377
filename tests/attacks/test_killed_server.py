"""A server that is killed or terminated during answers."""

import signal
import threading
from typing import Any

import httpx2
import pytest
from serving_alone import LONG, PATIENCE, Victim

BODY = {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "stream": True}
CLIENTS = 6


def read(victim: Victim, begun: threading.Semaphore, ends: list[str]) -> None:
    """Stream an answer; note how it ended: "done", "cut" or a status."""
    last = ""
    try:
        with (
            httpx2.Client(base_url=victim.url, timeout=PATIENCE) as http,
            http.stream("POST", "/v1/completions", json=BODY) as got,
        ):
            for line in filter(None, got.iter_lines()):
                begun.release()
                last = line
    except httpx2.TransportError:
        ends.append("cut")
        return
    if got.status_code != 200:
        ends.append(str(got.status_code))
    else:
        ends.append("done" if last == "data: [DONE]" else "cut")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_during_streams(count: Any, sent: signal.Signals) -> None:
    """Every client learns of the end. Told to end, the server finishes what it has begun."""
    for number in range(4 if LONG else 1):
        victim = Victim()
        begun, ends = threading.Semaphore(0), list[str]()
        arguments = (victim, begun, ends)
        threads = [threading.Thread(target=read, args=arguments) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for _ in range(1 + 40 * number):  # lines that have come
            assert begun.acquire(timeout=PATIENCE)
        victim.process.send_signal(sent)
        for thread in threads:
            thread.join(PATIENCE)
        assert len(ends) == CLIENTS, "a client still waits"
        if sent is signal.SIGTERM:
            assert victim.process.wait(PATIENCE) == 0 and set(ends) <= {"done", "503", "cut"}
            assert "done" in ends
        victim.close()
        count("kills during streams")
