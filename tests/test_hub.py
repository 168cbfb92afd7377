"""A hub that does not answer: one line after two attempts, whatever the command."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2 as httpx
import pytest
from huggingface_hub import errors
from json_files import write_lines
from refusals import refused, refused_command

from peagle.heads.format import head_folder
from peagle.model import loader
from peagle.model.loader import (
    AGAIN,
    ATTEMPTS,
    download,
    load_target,
    load_tokenizer,
    locate,
    reached,
)
from peagle.vllm.head import target_config

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
Hub = Callable[[int], list[bytes]]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    reached.cache_clear()
    yield
    reached.cache_clear()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Starts a hub that hangs up on its first connections; returns the requests to it."""
    asked = list[bytes]()
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(hang_up: int) -> None:
        while True:
            try:
                connection = listening.accept()[0]
            except OSError:
                return
            with connection:
                asked.append(connection.recv(65536))
                if len(asked) > hang_up:
                    connection.sendall(ANSWER)

    def start(hang_up: int) -> list[bytes]:
        Thread(target=serve, args=(hang_up,), daemon=True).start()
        return asked

    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}"
    )
    yield start
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


COMMANDS = (
    "generate owner/name hello", "serve owner/name --port 0", "doctor owner/name",
    "eval owner/name --dataset QUESTIONS", "bench owner/name --methods none --dataset QUESTIONS",
    "plan owner/name --tokens 1000 --context 100", "data show QUESTIONS --target owner/name",
    "generate qwen3-8b hello", "doctor owner/head owner/name", "export owner/head new --to vllm",
    "generate owner/name hello --head owner/head",
    "deploy owner/name --to kubernetes --head owner/head",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_asks_twice(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    asked = hub(1000)
    questions = str(write_lines(tmp_path / "q.jsonl", {"turns": ["the cat"]}))
    line = refused_command(capsys, *command.replace("QUESTIONS", questions).split())
    assert "the hub does not answer; check the hub id and the network" in line
    assert len(asked) == ATTEMPTS == 2


def test_one_lost_connection_is_no_failure(hub: Hub) -> None:
    asked = hub(1)
    assert reached() and len(asked) == 2
    assert locate("owner/name@v1") == ("owner/name", "v1")
    assert reached() and len(asked) == 2, "once a process"


def test_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", closed)
    with refused("target"):
        locate("owner/name")


def test_what_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dropping = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", dropping)
        monkeypatch.setattr(loader, "PATIENCE", 0.0)
        assert not reached()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (errors.RepositoryNotFoundError, "is not on the hub, or is private"),
        (errors.GatedRepoError, "is gated: accept its terms on its page at the hub"),
        (errors.RevisionNotFoundError, "has no such revision"),
    ],
)
def test_the_hub_says_no(
    monkeypatch: pytest.MonkeyPatch, kind: type[errors.HfHubHTTPError], why: str
) -> None:
    """Its own texts begin with the number of a request."""

    def refuses(hub_id: str, **how: Any) -> str:
        request = httpx.Request("GET", "https://huggingface.co")
        raise kind(
            "404 Client Error. (Request ID: 1)", response=httpx.Response(404, request=request)
        )

    monkeypatch.setattr(loader, "reached", lambda: True)
    monkeypatch.setattr(loader, "snapshot_download", refuses)
    with refused("target") as error:
        load_tokenizer("owner/name@v1")
    assert (error.value.why, error.value.value) == (why, "owner/name@v1")


@pytest.mark.parametrize(
    "kind", [httpx.ReadError, httpx.RemoteProtocolError, errors.XetDownloadError, RuntimeError]
)
def test_a_connection_that_breaks(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    """The hub's client raises these errors of the libraries below as they are."""

    def breaks(*_: object, **__: object) -> None:
        raise kind("the connection was reset")

    monkeypatch.setattr(loader, "reached", lambda: True)
    monkeypatch.setattr(loader, "snapshot_download", breaks)
    reads: dict[str, Callable[[str], object]] = {"target": load_target, "head": head_folder}
    for field, read in reads.items():
        with refused(field) as error:
            read("owner/name")
        assert error.value.fix == AGAIN
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", breaks)
    with refused("target"):
        target_config("owner/name")


def test_what_was_downloaded_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hub: its client looks in its cache only, and tries nothing."""
    asked = hub(1000)
    wanted = list[dict[str, Any]]()

    def cached(hub_id: str, **how: Any) -> str:
        wanted.append({"hub_id": hub_id, **how})
        return "/the/cache"

    monkeypatch.setattr(loader, "snapshot_download", cached)
    assert locate("owner/name@v1") == ("/the/cache", None)
    assert head_folder("owner/head") == download("owner/head", ["*"], "head") == Path("/the/cache")
    assert [(each["hub_id"], each["revision"]) for each in wanted[:2]] == [
        ("owner/name", "v1"),
        ("owner/head", None),
    ]
    assert all(each["local_files_only"] for each in wanted)
    assert len(asked) == ATTEMPTS
