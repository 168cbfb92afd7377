"""Which names a server without an API key answers to.

A page of another site can have its name lead to this machine (DNS rebinding), and a browser then
counts the server as that site's own. The Host header still holds that name.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from peagle.errors import shortened
from peagle.server.errors import content
from peagle.server.gate import loopback

App = Callable[..., Awaitable[None]]
ANY = "*"


class Hosts:
    """Middleware: refuses requests whose Host is neither a loopback name, nor the address that the
    client has reached, nor in `allowed` (lower case, without ports; "*" is any)."""

    def __init__(self, app: App, allowed: tuple[str, ...]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        app: App = self._app
        if scope["type"] == "http" and not self._known(scope):
            app = _refusal(_host(scope))
        await app(scope, receive, send)

    def _known(self, scope: MutableMapping[str, Any]) -> bool:
        name, reached = _name(_host(scope)), (scope.get("server") or ("",))[0]
        known = name == reached or name in self._allowed or ANY in self._allowed
        return known or loopback(name)


def _host(scope: MutableMapping[str, Any]) -> str:
    """The Host header; a client may leave it out only in HTTP/1.0, which no browser speaks."""
    return dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")


def _name(host: str) -> str:
    """The host without its port, in lower case; "" for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _refusal(host: str) -> JSONResponse:
    fix = "start it with --allowed-hosts NAME to add one"
    why = f"host {shortened(host)!r}: not a name of this server, {fix}"
    return JSONResponse(content(403, why), 403)
