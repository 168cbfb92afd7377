"""Asks for vLLM's API key on every route but those of load balancers and of Prometheus.

vLLM itself asks for it on /v1 and a few more: /invocations, which runs the model, is open (vllm
0.32.0, entrypoints/serve/middleware/authenticate.py). This file is alone in its folder and needs
the standard library only: `peagle serve --engine vllm` puts the folder on the path of vLLM's own
interpreter, which has no peagle.
"""

import hmac
import json
import os
from typing import Any

OPEN = ("/health", "/ping", "/metrics")
WHY = "missing or wrong API key: send the header Authorization: Bearer KEY"
BODY = {"error": {"message": WHY, "type": "invalid_request_error", "code": "invalid_api_key"}}
HEADERS = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]


class Key:
    """Answers requests without the key with status 401."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._passes(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": HEADERS})
            await send({"type": "http.response.body", "body": json.dumps(BODY).encode()})

    def _passes(self, scope: Any) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN or scope.get("method") == "OPTIONS":  # a browser asks for leave by that
            return True
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._wanted)
