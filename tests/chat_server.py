"""A stand-in for an OpenAI-compatible chat endpoint, in a thread of this process."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """A response; a body of None drops the connection."""

    body: Any
    status: int = 200
    headers: dict[str, str] = {}


def says(text: str | None, **more: Any) -> Reply:
    """A chat completion."""
    return Reply({"choices": [{"message": {"role": "assistant", "content": text, **more}}]})


def echo(body: dict[str, Any]) -> Reply:
    """Answers depend on what was asked alone."""
    return says(f"you said {body['messages'][-1]['content']}")


class ChatServer(ThreadingHTTPServer):
    """Answers with `behave(body)`; remembers the bodies and the headers it was sent."""

    daemon_threads = True

    def __init__(self, behave: Callable[[dict[str, Any]], Reply] = echo) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave, self.models = behave, Reply({"data": [{"id": "m"}]})
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> "ChatServer":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Clients that were killed are part of the test."""


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        self._send(self.server.models if self.path == "/v1/models" else Reply({}, 404))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.headers.append({k.lower(): v for k, v in self.headers.items()})
        self._send(
            self.server.behave(body) if self.path == "/v1/chat/completions" else Reply({}, 404)
        )

    def _send(self, reply: Reply) -> None:
        if reply.body is None:
            self.close_connection = True
            return
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Silence."""
