"""Clients that are slow, and clients that leave."""

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving_alone import LONG, PATIENCE, Victim

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Victim]:
    """A server that waits a second for headers and bodies."""
    made = Victim("--header-seconds", "1", "--body-seconds", "1")
    yield made
    made.close()


def connect(victim: Victim) -> socket.socket:
    return socket.create_connection(victim.address, timeout=PATIENCE)


def rest(connection: socket.socket) -> bytes:
    """All that still comes, until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("begun", [b"", b"G", b"POST /v1/completions HTTP/1.1\r\n", HEAD])
def test_headers_that_do_not_end(hasty: Victim, count: Any, begun: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(begun)
        assert rest(connection) == b""
    count("slow clients")


def test_headers_that_trickle(hasty: Victim, count: Any) -> None:
    """A byte at a time does not put the end off; nor does a whole request before."""
    with connect(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        closed = False
        for byte in HEAD:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                closed = True
                break
            time.sleep(0.05)
        assert closed
    count("slow clients")


def test_clients_that_leave(victim: Victim, count: Any) -> None:
    """In the middle of headers, of a body, and of a stream."""
    choose = random.Random(3)
    body = b'{"prompt": "the cat", "max_tokens": 200, "ignore_eos": true, "stream": true}'
    request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    tried = 400 if LONG else 60
    for _ in range(tried):
        with connect(victim) as connection:
            cut = choose.choice([choose.randrange(1, len(request)), len(request)])
            connection.sendall(request[:cut])
            if cut == len(request):
                connection.recv(choose.choice([1, 1000]))
            if choose.random() < 0.5:  # with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert victim.answers()
    end = time.monotonic() + PATIENCE
    while "num_requests_running" not in (text := victim.http.get("/metrics").text) or (
        'num_requests_running{model_name="tiny"} 0.0' not in text
    ):
        assert time.monotonic() < end, "what they asked for runs on"
        time.sleep(0.05)
    count("clients that leave", tried)
