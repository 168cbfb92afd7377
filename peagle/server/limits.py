"""The size and the time that a request's body may take, and the access log."""

import asyncio
import logging
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.errors import shortened
from peagle.server.auth import OPEN
from peagle.server.errors import ApiError

log = logging.getLogger("peagle.server.access")
BODY = 2 * 2**20  # bytes of a body, at most, and for each token of the context:
BODY_TOKEN = 16  # a token id and its comma take 8 bytes, escaped text seldom more
BODY_SECONDS = 60  # that a client may take to send it
REST = 64 * 2**20  # bytes that are read of a body that is too large, and
REST_SECONDS = 10  # for how long, so that the client reads why before the connection is closed
SHOWN = 48  # characters of a path that are logged: a long one may hold a client's text
CLOSE = {"connection": "close"}


def body_limit(context: int) -> int:
    """Bytes of a request's body, for a target of `context` tokens."""
    return BODY + BODY_TOKEN * context


class Limits:
    """Middleware: bodies have at most `body` bytes, and requests are logged. Handlers add to
    `scope["note"]` what is logged."""

    def __init__(self, app: ASGIApp, body: int) -> None:
        self._app = app
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        note: dict[str, Any] = {"status": 500}  # unless a response begins
        scope["note"] = note

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
            elif note["status"] == 413 and not message.get("more_body"):
                await send({**message, "more_body": True})
                await _drain(receive)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            await self._app(scope, self._limited(scope, receive), sent)
        finally:
            fields = {"method": scope["method"], "path": shortened(scope["path"], SHOWN), **note}
            fields["seconds"] = round(time.monotonic() - began, 4)
            quiet = scope["path"] in (*OPEN, "/metrics") and note["status"] == 200
            log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Raises ApiError once a body is too long, or takes too long."""
        size = int(Headers(scope=scope).get("content-length", 0))
        seen = 0
        whole = False
        until = time.monotonic() + BODY_SECONDS

        async def received() -> Message:
            nonlocal seen, whole
            if whole:  # what is still to come is that the client leaves
                return await receive()
            if size <= self._body:
                message = await _receive_until(receive, until)
                seen += len(message.get("body", b""))
                whole = not message.get("more_body", False)
            if max(size, seen) > self._body:
                why = f"the body has more than {self._body} bytes: shorten it"
                raise ApiError(413, why, headers=CLOSE)
            return message

        return received


async def _receive_until(receive: Receive, until: float) -> Message:
    try:
        return await asyncio.wait_for(receive(), until - time.monotonic())
    except TimeoutError as error:
        why = f"the body has not come within {BODY_SECONDS} seconds: send it again"
        raise ApiError(408, why, headers=CLOSE) from error


async def _drain(receive: Receive) -> None:
    """Read on, and keep nothing, while the client still sends: a connection that is closed before
    loses the response, too."""
    seen = 0
    until = time.monotonic() + REST_SECONDS
    try:
        while seen < REST:
            message = await asyncio.wait_for(receive(), until - time.monotonic())
            if not message.get("more_body"):
                return
            seen += len(message["body"])
    except TimeoutError:
        return
