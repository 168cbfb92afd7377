"""A question to a running deployment: parts of its answer, speed, and acceptance."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from peagle.deploy.invoke import acceptance, ask, drafted, over_http, question
from peagle.deploy.plan import DeployFailed


def events(*deltas: dict[str, Any], tokens: int = 5) -> bytes:
    """A streamed answer, as a server sends it."""
    told = [{"choices": [{"delta": delta}]} for delta in deltas]
    told.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return b"".join(b"data: %s\n\n" % json.dumps(it).encode() for it in told) + b"data: [DONE]\n"


ANSWER = events(
    {"role": "assistant"}, {"reasoning_content": "Hm."}, {"content": "Röt"}, {"content": "."}
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_parts_may_be_cut_anywhere(size: int) -> None:
    shown = list[str]()
    parts = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    speed = ask(parts, shown.append)
    assert "".join(shown) == "Hm.Röt." and speed.startswith("5 tokens in ")
    assert "tokens a second" in speed


@pytest.mark.parametrize(
    "parts",
    [
        [b'{"error": {"message": "out of memory"}}'],
        [b'data: {"error": {"message": "out of memory"}}\n'],
        [b'data: {"error": "out of memory"}\n'],
    ],
)
def test_an_error_in_the_place_of_an_answer(parts: list[bytes]) -> None:
    with pytest.raises(DeployFailed, match="out of memory"):
        ask(parts, print)
    with pytest.raises(DeployFailed, match="no text"):
        ask([events()], print)
    with pytest.raises(DeployFailed, match="no answer"):
        ask([b"<html>"], print)


class Server(BaseHTTPRequestHandler):
    """vLLM's part: one answer, and counters that each answer moves."""

    drafts = 0
    counted = True

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        labels = '{engine="0",model_name="m"}'
        text = f"vllm:spec_decode_num_drafts_total{labels} {Server.drafts}.0\n"
        text += f"vllm:spec_decode_num_accepted_tokens_total{labels} {Server.drafts * 2}.0\n"
        self._send(200, text.encode() if Server.counted else b"up 1\n")

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        if self.headers["Authorization"] != "Bearer secret":
            self._send(401, b'{"error": "Unauthorized"}')
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked == question("me", "Why?", 9)
        Server.drafts += 4
        self._send(200, ANSWER)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_server_is_asked(url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address may be copied from what `peagle serve` prints."""
    url += path
    before = drafted(url, "secret")
    assert acceptance(before, before) == "nothing was drafted"
    ask(over_http(url, "secret", question("me", "Why?", 9)), lambda text: None)
    assert acceptance(before, drafted(url, "secret")) == "acceptance length 3.00"
    monkeypatch.setattr(Server, "counted", False)
    assert "not known" in acceptance(before, drafted(url, "secret"))


def test_a_server_that_refuses_or_is_not_there(url: str) -> None:
    body = question("me", "Why?", 9)
    with pytest.raises(DeployFailed, match="HTTP 401: .*Unauthorized"):
        list(over_http(url, None, body))
    for wrong in ("http://127.0.0.1:1", "http://[", "nowhere"):
        with pytest.raises(DeployFailed, match="no answer from"):
            list(over_http(wrong, None, body))
        assert drafted(wrong, None) is None
