"""What every request passes: the key, and the log."""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from peagle.server.errors import content

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("peagle.server.access")
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
        began, note = time.monotonic(), dict[str, Any]()
        scope["note"] = note

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
            await send(message)

        try:
            if self._allows(scope):
                await self._app(scope, receive, sent)
            else:
                await _refusal()(scope, receive, sent)
        finally:
            shown = {"method": scope["method"], "path": scope["path"], **note}
            shown["seconds"] = round(time.monotonic() - began, 4)
            quiet = scope["path"] in (*OPEN, "/metrics") and note.get("status") == 200
            log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": shown})

    def _allows(self, scope: Scope) -> bool:
        if self._wanted is None or scope["path"] in OPEN:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._wanted)


def _refusal() -> JSONResponse:
    why = "missing or wrong API key: send the header Authorization: Bearer KEY"
    said = content(401, why, code="invalid_api_key")
    return JSONResponse(said, 401, {"www-authenticate": "Bearer"})
