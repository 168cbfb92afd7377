"""The middleware by which vLLM asks for its key on every route; vLLM itself is asked by
`test_serve_with_vllm.py`."""

import runpy
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from peagle.vllm.serve import KEY_MIDDLEWARE, MIDDLEWARE

PATHS = ("/health", "/ping", "/metrics", "/invocations", "/tokenize", "/v1/models", "/other/health")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    module, name = KEY_MIDDLEWARE.split(".")
    return runpy.run_path(str(MIDDLEWARE / f"{module}.py"))[name]


def guarded(key: Any) -> Any:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("run")

    every = ["GET", "POST", "OPTIONS"]
    app = Starlette(routes=[Route(path, answer, methods=every) for path in PATHS])
    app.add_middleware(key)
    return app


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_only_probes_and_metrics_are_open(key: Any) -> None:
    for app, root in ((guarded(key), ""), (Starlette(routes=[Mount("/a", guarded(key))]), "/a")):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://a") as http:
            for path in PATHS:
                opened = 200 if path in PATHS[:3] else 401
                assert (await http.get(root + path)).status_code == opened, path
                for given, status in (("secret", 200), ("secre", opened), ("", opened)):
                    headers = {"Authorization": f"Bearer {given}"}
                    answer = await http.post(root + path, headers=headers)
                    assert answer.status_code == status, (path, given)
            refused = await http.post(f"{root}/invocations")
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (await http.options(f"{root}/v1/models")).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_web_sockets_are_closed(key: Any) -> None:
    sent = list[dict[str, Any]]()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await key(guarded(key))(scope, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
