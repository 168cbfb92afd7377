"""Middleware: API key and Host header, limits of bodies, access log, the console's page, and
SageMaker's choice of a route.

`Pages` and `Route` suit any server of OpenAI's API. vLLM takes them where it finds this package:
`--middleware peagle.server.middleware.Pages`, or `Route`.

A page of another site can have its name lead to this machine (DNS rebinding), and a browser then
counts the server as that site's own. The Host header still holds that name.
"""

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.errors import shortened
from peagle.server.responses import ApiError

log = logging.getLogger("peagle.server.access")
OPEN = ("/health", "/ping")  # load balancers have no key
BODY_BYTES = 2 * 2**20  # maximum size of a body, plus for each token of the context:
BODY_BYTES_PER_TOKEN = 16  # a token id and its comma take 8 bytes, escaped text seldom more
BODY_SECONDS = 60  # maximum time to receive a body
DRAIN_BYTES = 64 * 2**20  # maximum bytes read of a body that is too large, and maximum
DRAIN_SECONDS = 10  # time, so that the client reads the error before the connection is closed
LOGGED = 48  # maximum characters of a logged path: it may hold a client's text
CLOSE = {"connection": "close"}
ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
FOLDER = Path(__file__).with_name("ui")
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = yaml.safe_load(Path(__file__).with_name("pages.yaml").read_text())


class Pages:
    """Serves the console's files. They need no key, since the page holds no secret."""

    def __init__(self, app: ASGIApp) -> None:
        """The files are read once: no path of a request is ever opened."""
        self._app = app
        self._pages = {f"/ui/{file.name}": _response(file) for file in FOLDER.iterdir()}
        self._pages["/"] = self._pages.pop("/ui/index.html")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        page = self._pages.get(scope["path"]) if asked else None
        await (page or self._app)(scope, receive, send)


class Route:
    """Sends a request to the route that its header names. SageMaker has one address, /invocations;
    `X-Amzn-SageMaker-Custom-Attributes: route=/v1/chat/completions` names a route, as in AWS's vLLM
    container (aws/deep-learning-containers, scripts/docker/vllm/sagemaker_serve.py). Without it the
    body decides."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/invocations":
            given = dict(scope["headers"]).get(ATTRIBUTES, b"")
            if named := re.search(rb"\broute=(/[^\s,;]+)", given):
                scope = {**scope, "path": named[1].decode("latin-1"), "raw_path": named[1]}
        await self._app(scope, receive, send)


class Auth:
    """Answers with the ApiError that `check` raises, where it raises one."""

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
    """Raise ApiError for a request without the key as a bearer token."""
    given = http.headers.get("authorization", "").encode("latin-1")
    if http.scope["path"] not in OPEN and not hmac.compare_digest(given, f"Bearer {key}".encode()):
        why = "missing or wrong API key: send the header Authorization: Bearer KEY"
        raise ApiError(401, why, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def check_host_header(allowed: tuple[str, ...], http: Request) -> None:
    """Raise ApiError for a request whose Host is neither a loopback name, nor the address that the
    client has reached, nor in `allowed` (lower case, without ports; "*" is any)."""
    host = http.headers.get("host", "localhost")  # only HTTP/1.0, so no browser, may leave it out
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    reached = (http.scope.get("server") or ("",))[0]
    if name not in (reached, *allowed) and "*" not in allowed and not loopback(name):
        why = "not a name of this server; `allowed_hosts` can add it"
        raise ApiError(403, f"host {shortened(repr(host))}: {why}")


def loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may lead anywhere


class Limits:
    """Refuses bodies that are too large for a target of `context` tokens, and logs requests with
    the fields that handlers add to `scope["note"]`."""

    def __init__(self, app: ASGIApp, context: int) -> None:
        self._app = app
        self._max_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * context

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
            path = shortened(scope["path"], LOGGED)
            fields = {"method": scope["method"], "path": path, **note}
            fields["seconds"] = round(time.monotonic() - began, 4)
            quiet = scope["path"] in (*OPEN, "/metrics") and note["status"] == 200
            level = logging.DEBUG if quiet else logging.INFO
            log.log(level, "request", extra={"fields": fields})

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """A `receive` that raises ApiError once a body is too long, or takes too long."""
        size = int(Headers(scope=scope).get("content-length", 0))
        seen = 0
        whole = False
        until = time.monotonic() + BODY_SECONDS

        async def received() -> Message:
            nonlocal seen, whole
            if whole:  # the next message is the client's disconnect
                return await receive()
            if size <= self._max_bytes:
                try:
                    message = await asyncio.wait_for(receive(), until - time.monotonic())
                except TimeoutError as error:
                    why = f"the body has not come within {BODY_SECONDS} seconds: send it again"
                    raise ApiError(408, why, headers=CLOSE) from error
                seen += len(message.get("body", b""))
                whole = not message.get("more_body", False)
            if max(size, seen) > self._max_bytes:
                why = f"the body has more than {self._max_bytes} bytes: shorten it"
                raise ApiError(413, why, headers=CLOSE)
            return message

        return received


async def _drain(receive: Receive) -> None:
    """Read and drop the rest of a body: a connection that is closed while the client still sends
    loses the response, too."""
    left = DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])


def _response(file: Path) -> Response:
    return Response(file.read_bytes(), media_type=KINDS[file.suffix[1:]], headers=HEADERS)
