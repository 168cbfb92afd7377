"""Running of a server: its socket, its end, and its log."""

import asyncio
import gc
import json
import logging
import socket
from datetime import UTC, datetime
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from peagle.engine.llm import LLM
from peagle.errors import InputError
from peagle.server.app import Announce, Api, ServerConfig, create_app
from peagle.server.middleware import loopback

log = logging.getLogger(__name__)
HEADER_SECONDS = 15  # maximum time to receive a request's headers
END_SECONDS = 10  # maximum time, at the end, for clients to read their answers


class Protocol(H11Protocol):
    """uvicorn's protocol with a deadline for headers; uvicorn itself waits for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._clear()

    def _watch(self) -> None:
        """Close the connection at the deadline, unless a request's headers have come by then."""
        if self.conn.their_state is not h11.IDLE:
            self._clear()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A server that ends gracefully. After a signal it refuses new requests and ends the running
    ones well; a second signal cancels them. It ends by itself when its engine fails."""

    def __init__(self, api: Api, announce: Announce = lambda: None) -> None:
        config = uvicorn.Config(
            create_app(api, announce), log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=END_SECONDS, http=Protocol,
        )  # fmt: skip
        super().__init__(config)
        self.worker = api.worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal. (uvicorn's handler would refuse all at once, and end by the signal.)"""
        if self.worker.draining:
            self.worker.cancelled = True
        self.worker.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; asked ten times a second."""
        if self.worker.failed or (self.worker.draining and not self.worker.open):
            self.should_exit = True
        return await super().on_tick(counter)


class JsonLines(logging.Formatter):
    """Formats a record as a line of JSON with its `fields`. No line holds text of a prompt or an
    answer."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Write the logs of the server and of uvicorn."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name, level in {"peagle": logging.INFO, "uvicorn": logging.WARNING}.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def check_host(host: str, api_key: str | None, allow_no_key: bool) -> None:
    """Raise InputError for an address that other machines reach, where no key is needed."""
    if api_key == "":
        raise InputError("is empty", field="api_key", value="", fix="give a key or leave it out")
    if api_key is None and not allow_no_key and not loopback(host):
        fix = "give `api_key` KEY (or `allow_no_key`)"
        raise InputError("other machines can reach it", field="host", value=host, fix=fix)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 selects a free port. Raises InputError when it cannot listen."""
    ipv6 = ":" in host
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=ipv6)
    except (OSError, OverflowError, ValueError) as error:  # ValueError: there is no IPv6
        why = f"cannot listen on host {host!r}: {error}"
        fix = "choose another `host` or `port`"
        raise InputError(why, field="port", value=port, fix=fix) from error


def serve(
    llm: LLM, config: ServerConfig, listening: socket.socket, announce: Announce = lambda: None
) -> bool:
    """Serve until a signal; returns False when the start or the engine failed."""
    api = Api(llm, config)
    host, port = listening.getsockname()[:2]
    fields = {
        "host": host,
        "port": port,
        "model": config.model,
        "context": api.context,
        "method": llm.drafting.method,
        "drafts": str(llm.drafting),
        "kv_tokens": llm.engine.settings.kv_tokens,
    }

    def started() -> None:
        announce()
        log.info("serving", extra={"fields": fields})

    server = Server(api, started)
    gc.collect()
    gc.freeze()  # collecting the modules again would stop all requests for 0.2 s
    try:
        server.run(sockets=[listening])
    finally:
        gc.unfreeze()
    return server.started and not api.worker.failed
