"""Host names that the server accepts, and logged paths."""

import logging

import pytest
from serving import Serve

PATHS = ("/", "/v1/models", "/health", "/metrics", "/openapi.json", "/peagle/catalog")


def statuses(running, host: str) -> set[int]:
    """Those of all kinds of routes."""
    with running.http() as http:
        return {http.get(path, headers={"host": host}).status_code for path in PATHS}


def test_names_that_are_allowed(serve: Serve) -> None:
    running = serve(allowed_hosts=("models.example",))
    for host in ("models.example", "MODELS.example:8000", "localhost:1", "127.8.8.8", "[::1]:80"):
        assert statuses(running, host) == {200}, host
    for host in ("example", "x.models.example", "127.0.0.1.evil.example", "192.0.2.1", "[", ""):
        assert statuses(running, host) == {403}, host
    assert statuses(serve(allowed_hosts=("*",)), "evil.example") == {200}


def test_with_a_key_any_name(serve: Serve) -> None:
    """Another site's page has no key."""
    headers = {"host": "models.example", "authorization": "Bearer secret"}
    assert serve(api_key="secret").get("/v1/models", headers=headers).status_code == 200


def test_a_foreign_name_is_told_of(serve: Serve) -> None:
    error = serve().get("/v1/models", headers={"host": "evil.example"}).json()["error"]
    assert error["type"] == "permission_error" and "'evil.example'" in error["message"]


def test_long_paths_are_not_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "peagle.server.access"), serve().http() as http:
        http.get("/v1/models/" + "my secret prompt " * 20)
        http.get("/v1/models/tiny")
    paths = [record.fields["path"] for record in caplog.records if hasattr(record, "fields")]
    assert paths == ["/v1/models/my secret prompt my secret prompt ...", "/v1/models/tiny"]
