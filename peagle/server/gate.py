"""What every request passes: the key, a limit to its size, and the log."""

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from peagle.errors import shortened
from peagle.server.errors import ApiError, content

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("peagle.server.access")
BODY = 2 * 2**20  # bytes of a body, at most, and for each token of the context:
BODY_TOKEN = 16  # a token id and its comma take 8 bytes, escaped text seldom more
BODY_SECONDS = 60  # that a client may take to send it
REST = 64 * 2**20  # bytes that are read of a body that is too large, and
REST_SECONDS = 10  # for how long, so that the client reads why before the connection is closed
SHOWN = 48  # characters of a path that are logged: a long one may hold a client's text
TOO_SLOW = f"the body has not come within {BODY_SECONDS} seconds: send it again"
OPEN = ("/health", "/ping")  # what load balancers ask has no key


def body_limit(context: int) -> int:
    """Bytes of a request's body, for a target of `context` tokens."""
    return BODY + BODY_TOKEN * context


class Gate:
    """Middleware. With a `key`, requests must bring it as a bearer token; bodies have at most
    `limit` bytes. Handlers add to `scope["note"]` what is logged."""

    def __init__(self, app: App, key: str | None, limit: int) -> None:
        self._app, self._limit = app, limit
        self._too_large = f"the body has more than {limit} bytes: shorten it"
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, note = time.monotonic(), dict[str, Any](status=500)  # unless a response begins
        scope["note"] = note

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
            elif note["status"] == 413 and not message.get("more_body"):
                await send({**message, "more_body": True})
                await _drain(receive)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            refusal = self._refusal(dict(reversed(scope["headers"])), scope["path"])
            app = refusal or self._app
            await app(scope, self._limited(receive), sent)
        finally:
            shown = {"method": scope["method"], "path": shortened(scope["path"], SHOWN), **note}
            shown["seconds"] = round(time.monotonic() - began, 4)
            quiet = scope["path"] in (*OPEN, "/metrics") and note["status"] == 200
            log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": shown})

    def _refusal(self, headers: dict[bytes, bytes], path: str) -> JSONResponse | None:
        given = headers.get(b"authorization", b"")
        guarded = self._wanted is not None and path not in OPEN
        if guarded and not hmac.compare_digest(given, self._wanted or b""):
            why = "missing or wrong API key: send the header Authorization: Bearer KEY"
            said = content(401, why, code="invalid_api_key")
            return JSONResponse(said, 401, {"www-authenticate": "Bearer"})
        if int(headers.get(b"content-length", b"0")) > self._limit:
            return JSONResponse(content(413, self._too_large), 413, {"connection": "close"})
        return None

    def _limited(self, receive: Receive) -> Receive:
        """Raises ApiError once a body that did not give its length is too long, or any takes too
        long."""
        seen, whole, until = 0, False, time.monotonic() + BODY_SECONDS

        async def received() -> MutableMapping[str, Any]:
            nonlocal seen, whole
            if whole:  # what is still to come is that the client leaves
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except TimeoutError as error:
                raise ApiError(408, TOO_SLOW, headers={"connection": "close"}) from error
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > self._limit:
                raise ApiError(413, self._too_large, headers={"connection": "close"})
            return message

        return received


def loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: nobody knows where it leads


async def _drain(receive: Receive) -> None:
    """Read on, and keep nothing, while the client still sends: a connection that is closed before
    loses the response, too."""
    seen, until = 0, time.monotonic() + REST_SECONDS
    try:
        while seen < REST:
            message = await asyncio.wait_for(receive(), until - time.monotonic())
            if not message.get("more_body"):
                return
            seen += len(message["body"])
    except TimeoutError:
        return
