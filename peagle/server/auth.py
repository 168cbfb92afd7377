"""Who may ask: clients with the API key or, without one, clients that use one of its names.

A page of another site can have its name lead to this machine (DNS rebinding), and a browser then
counts the server as that site's own. The Host header still holds that name.
"""

import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.errors import shortened
from peagle.server.errors import ApiError

OPEN = ("/health", "/ping")  # load balancers have no key


class Auth:
    """Middleware: `check` raises ApiError for a request that is refused."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except ApiError as error:
                app = error.response()
        await app(scope, receive, send)


def check_key(key: str, http: Request) -> None:
    """Raises ApiError for a request that does not carry the key as a bearer token."""
    given = http.headers.get("authorization", "").encode("latin-1")
    if http.scope["path"] not in OPEN and not hmac.compare_digest(given, f"Bearer {key}".encode()):
        why = "missing or wrong API key: send the header Authorization: Bearer KEY"
        headers = {"www-authenticate": "Bearer"}
        raise ApiError(401, why, code="invalid_api_key", headers=headers)


def check_host_header(allowed: tuple[str, ...], http: Request) -> None:
    """Raises ApiError for a request whose Host is neither a loopback name, nor the address that the
    client has reached, nor in `allowed` (lower case, without ports; "*" is any)."""
    name = _name(_host(http))
    reached = (http.scope.get("server") or ("",))[0]
    if name not in (reached, *allowed) and "*" not in allowed and not loopback(name):
        host = shortened(repr(_host(http)))
        why = f"host {host}: not a name of this server, `allowed_hosts` can add it"
        raise ApiError(403, why)


def loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may lead anywhere


def _host(http: Request) -> str:
    """The Host header; a client may leave it out only in HTTP/1.0, which no browser speaks."""
    return http.headers.get("host", "localhost")


def _name(host: str) -> str:
    """The host without its port, in lower case; "" for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
