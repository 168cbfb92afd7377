"""What every request passes: the key, a limit to its size, and the log."""

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from peagle.server.errors import ApiError, content

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("peagle.server.access")
MAX_BODY = 8 * 2**20  # bytes; a prompt of a million token ids fits
BODY_SECONDS = 60  # that a client may take to send it
TOO_LARGE = f"the body has more than {MAX_BODY} bytes: shorten it"
TOO_SLOW = f"the body has not come within {BODY_SECONDS} seconds: send it again"
OPEN = ("/health", "/ping")  # what load balancers ask has no key


class Gate:
    """Middleware. With a `key`, requests must bring it as a bearer token. Handlers add to
    `scope["note"]` what the log is to say."""

    def __init__(self, app: App, key: str | None) -> None:
        self._app = app
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
            await send(message)

        try:
            refusal = self._refusal(dict(reversed(scope["headers"])), scope["path"])
            app = refusal or self._app
            await app(scope, _limited(receive), sent)
        finally:
            shown = {"method": scope["method"], "path": scope["path"], **note}
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
        if int(headers.get(b"content-length", b"0")) > MAX_BODY:
            return JSONResponse(content(413, TOO_LARGE), 413, {"connection": "close"})
        return None


def loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: nobody knows where it leads


def _limited(receive: Receive) -> Receive:
    """Raises ApiError once a body that did not say its length is too long, or any takes too
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
        if seen > MAX_BODY:
            raise ApiError(413, TOO_LARGE, headers={"connection": "close"})
        return message

    return received
