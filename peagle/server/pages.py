"""The console's page: its files, which any server of OpenAI's API can hand out.

vLLM does with `--middleware peagle.server.pages.Pages`, where it finds this package.
"""

from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

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
    """Middleware, outside of all other: the page holds no secret, and needs no key."""

    def __init__(self, app: ASGIApp) -> None:
        """The files are read once: no path of a request is ever opened."""
        self._app = app
        self._pages = {f"/ui/{file.name}": _response(file) for file in FOLDER.iterdir()}
        self._pages["/"] = self._pages.pop("/ui/index.html")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        page = self._pages.get(scope["path"]) if asked else None
        await (page or self._app)(scope, receive, send)


def _response(file: Path) -> Response:
    return Response(file.read_bytes(), media_type=KINDS[file.suffix], headers=HEADERS)
