"""Clients that are slow, that leave, that send too much, or that come by another name."""

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving_alone import LONG, PATIENCE, Victim

ROUTES = (
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/peagle/console"),
    ("GET", "/peagle/catalog"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/invocations"),
    ("POST", "/peagle/race"),
)
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


def test_bodies_that_do_not_end(hasty: Victim, count: Any) -> None:
    with connect(hasty) as connection:
        connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"prompt": ')
        assert b" 408 " in rest(connection).split(b"\r\n")[0]
    count("slow clients")
    assert hasty.answers()


@pytest.mark.parametrize("length", [True, False], ids=["with a length", "in chunks"])
def test_too_large_a_body(victim: Victim, count: Any, length: bool) -> None:
    """A client that sends all of it, and reads only then, reads why it was refused."""
    body = b'{"prompt": "' + b"a" * 9_000_000 + b'"}'
    if length:
        request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    else:
        chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
        request = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
    for _ in range(5):
        with connect(victim) as connection:
            connection.sendall(request)
            answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"the body has more than" in answer
    count("bodies of 9 MB", 5)


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


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", ""]
)
def test_another_sites_name(victim: Victim, count: Any, name: str) -> None:
    """DNS rebinding: the page of another site whose name leads to this machine gets nothing."""
    for method, path in ROUTES:
        answer = victim.http.request(method, path, headers={"host": name})
        assert answer.status_code == 403, (method, path)
        assert "not a name of this server" in answer.json()["error"]["message"]
    count("requests by another site's name", len(ROUTES))


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "LOCALHOST:80", "[::1]:8000", "127.8.8.8"]
)
def test_its_own_names(victim: Victim, name: str) -> None:
    assert victim.http.get("/v1/models", headers={"host": name}).status_code == 200
