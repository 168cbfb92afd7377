"""SageMaker's choice of a route: one address, /invocations, for all of them.

The header `X-Amzn-SageMaker-Custom-Attributes: route=/v1/chat/completions` names it, as in AWS's
vLLM container (aws/deep-learning-containers, scripts/docker/vllm/sagemaker_serve.py). It knows
nothing of the server, so that vLLM takes it, too: `--middleware peagle.server.route.Route`.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"


class Route:
    """Middleware: a request for /invocations that names a route is one for that route. Without
    one, the body decides."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/invocations":
            given = dict(scope["headers"]).get(ATTRIBUTES, b"")
            if named := re.search(rb"\broute=(/[^\s,;]+)", given):
                path = named[1].decode("latin-1")
                scope = {**scope, "path": path, "raw_path": named[1]}
        await self._app(scope, receive, send)
