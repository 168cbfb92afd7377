"""Middleware for any server of OpenAI's API: the console's page, and SageMaker's choice of a route.

It knows nothing of our server, so that vLLM takes it, too, where it finds this package:
`--middleware peagle.server.middleware.Pages`, or `Route`.
"""

import re
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
FOLDER = Path(__file__).with_name("ui")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs its own files only, and text can become markup nowhere (trusted types).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Pages:
    """The console's files. It goes outside of all other middleware: the page holds no secret, and
    needs no key."""

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
    """SageMaker has one address, /invocations, for all routes: the header
    `X-Amzn-SageMaker-Custom-Attributes: route=/v1/chat/completions` names one, as in AWS's vLLM
    container (aws/deep-learning-containers, scripts/docker/vllm/sagemaker_serve.py). Without it the
    body decides."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/invocations":
            given = dict(scope["headers"]).get(ATTRIBUTES, b"")
            if named := re.search(rb"\broute=(/[^\s,;]+)", given):
                path = named[1].decode("latin-1")
                scope = {**scope, "path": path, "raw_path": named[1]}
        await self._app(scope, receive, send)


def _response(file: Path) -> Response:
    return Response(file.read_bytes(), media_type=KINDS[file.suffix], headers=HEADERS)
