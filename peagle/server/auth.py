"""Who may ask: clients with the API key, or, without one, those that call the server by its name.

A page of another site can have its name lead to this machine (DNS rebinding), and a browser then
counts the server as that site's own. The Host header still holds that name.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.errors import shortened
from peagle.server.errors import ApiError

OPEN = ("/health", "/ping")  # load balancers have no key
ANY = "*"


class ApiKey:
    """Middleware: requests must carry the `key` as a bearer token."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = Request(scope).headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                why = "missing or wrong API key: send the header Authorization: Bearer KEY"
                headers = {"www-authenticate": "Bearer"}
                app = ApiError(401, why, code="invalid_api_key", headers=headers).response()
        await app(scope, receive, send)


class Hosts:
    """Middleware: refuses requests whose Host is neither a loopback name, nor the address that the
    client has reached, nor in `allowed` (lower case, without ports; "*" is any)."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not self._known(scope):
            host = shortened(repr(_host(Request(scope))))
            why = f"host {host}: not a name of this server, `allowed_hosts` can add it"
            app = ApiError(403, why).response()
        await app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        name = _name(_host(Request(scope)))
        reached = (scope.get("server") or ("",))[0]
        return name in (reached, *self._allowed) or ANY in self._allowed or loopback(name)


def loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: nobody knows where it leads


def is_trusted(http: Request, key: str | None) -> bool:
    """Whether a client may have this machine run something: one with the `key`, which has been
    checked; without, only one on this machine that calls it by such a name."""
    if key is not None:
        return True
    return http.client is not None and loopback(http.client.host) and loopback(_name(_host(http)))


def check_same_origin(http: Request) -> None:
    """Raises ApiError for whatever another site could have a browser send."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type {kind!r}: must be application/json")
    origin = http.headers.get("origin", "")
    site = http.headers.get("sec-fetch-site", "same-origin")
    # A browser leaves a scheme's own port out of both headers.
    if origin.lower() != f"{http.url.scheme}://{_host(http)}".lower() or site != "same-origin":
        raise ApiError(403, f"origin {origin!r}: only the console at this address may deploy")


def _host(http: Request) -> str:
    """The Host header; a client may leave it out only in HTTP/1.0, which no browser speaks."""
    return http.headers.get("host", "localhost")


def _name(host: str) -> str:
    """The host without its port, in lower case; "" for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
