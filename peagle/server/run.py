"""A server from its first request to its last, and its log."""

import asyncio
import gc
import json
import logging
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from peagle.engine.llm import LLM
from peagle.errors import InputError
from peagle.server.app import Api, ServerConfig, create_app
from peagle.server.auth import loopback

log = logging.getLogger(__name__)
HEADER_SECONDS = 15  # that a client may take to send a request's headers
LAST_WORDS = 10  # seconds that clients have, at the end, to read what was sent


class Protocol(H11Protocol):
    """uvicorn's, which waits for ever for headers that a client does not finish."""

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
        """Have the connection closed in time, unless a request's headers are there."""
        if self.conn.their_state is not h11.IDLE:
            self._clear()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _clear(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """Told to end, it lets running requests finish and takes no others; told twice, it cancels
    them. It ends by itself when its engine fails."""

    def __init__(self, api: Api, announce: Callable[[], None] = lambda: None) -> None:
        """`announce` as in `serve`."""
        config = uvicorn.Config(
            create_app(api), log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=LAST_WORDS, http=Protocol,
        )  # fmt: skip
        super().__init__(config)
        self.worker = api.worker
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer what the sockets accept."""
        await super().startup(sockets)
        if self.started:
            self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. (uvicorn's own would close the door at once, and end by the same signal.)"""
        if self.worker.draining:
            self.worker.cancel_all()
        self.worker.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is over."""
        if self.worker.failed or (self.worker.draining and not self.worker.open):
            self.should_exit = True
        return await super().on_tick(counter)


class JsonLines(logging.Formatter):
    """A line of JSON for each record, with the `fields` it was given. No line holds text of a
    prompt or an answer."""

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
    """Have the server's and uvicorn's logs written."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("peagle", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name == "peagle" else logging.WARNING)


def check_host(host: str, api_key: str | None, allow_no_key: bool) -> None:
    """Raises InputError for an address that other machines reach, where no key is needed."""
    if api_key == "":
        raise InputError("api_key '': is empty, give a key or leave it out")
    if api_key is None and not allow_no_key and not loopback(host):
        why = "others can reach it, give `api_key` KEY (or `allow_no_key`)"
        raise InputError(f"host {host}: {why}")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free. Raises InputError when it cannot."""
    ipv6 = ":" in host
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=ipv6)
    except (OSError, OverflowError, ValueError) as error:  # ValueError: there is no IPv6
        why = f"{error}; choose another `host` or `port`"
        raise InputError(f"host {host} `port` {port}: {why}") from error


def serve(
    llm: LLM,
    config: ServerConfig,
    listening: socket.socket,
    announce: Callable[[], None] = lambda: None,
) -> bool:
    """Serve until told to end; returns whether it ended well. `announce` is called once, when
    requests are accepted."""
    api = Api(llm, config)
    host, port = listening.getsockname()[:2]
    where = {"host": host, "port": port, "model": config.model, "context": api.context}
    drafting = {"method": llm.drafting.method, "drafts": str(llm.drafting)}
    room = {"kv_tokens": llm.engine.settings.kv_tokens}

    def started() -> None:
        announce()
        log.info("serving", extra={"fields": where | drafting | room})

    server = Server(api, started)
    gc.collect()
    gc.freeze()  # collecting the modules again takes 0.2 s, which all requests would wait for
    try:
        server.run(sockets=[listening])
    finally:
        gc.unfreeze()
    return not api.worker.failed
