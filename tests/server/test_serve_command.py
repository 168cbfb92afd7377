"""`peagle serve` as a process: its options, its log, its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import APIConnectionError, APIStatusError, OpenAI
from refusals import refused, refused_command
from tiny import make_target, save_target

import peagle.server
from peagle.cli.main import main
from peagle.engine.llm import LLM
from peagle.server.app import ServerConfig
from peagle.server.run import Server, bind, check_host, serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(make_target(context=2048), tmp_path_factory.mktemp("target"))


class Process:
    """A server, what it logs, and a client."""

    def __init__(self, *args: object) -> None:
        quiet = os.environ | {"PEAGLE_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *map(str, args)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.lines: list[dict[str, Any]] = []
        while not self.lines:
            line = self.process.stderr.readline()
            assert line, "it has ended"
            if line.startswith("{"):
                self.lines.append(json.loads(line))
        url = f"http://127.0.0.1:{self.lines[0]['port']}/v1"
        self.client = OpenAI(base_url=url, api_key="secret", max_retries=0)

    def health(self) -> httpx2.Response:
        return httpx2.get(f"http://127.0.0.1:{self.lines[0]['port']}/health", timeout=30)

    def end(self) -> int:
        _, rest = self.process.communicate(timeout=60)
        self.lines += [json.loads(line) for line in rest.splitlines()]
        return self.process.returncode


@contextmanager
def served(*args: object) -> Iterator[Process]:
    process = Process(*args)
    try:
        yield process
    finally:
        process.process.kill()


def test_what_a_person_needs_next(folder: Path) -> None:
    """The URL, a curl command that answers when pasted, the console; and never the key."""
    options = ("--port", 0, "--no-speculation", "--served-model-name", "it's", "--kv-tokens", 4096)
    with served("-m", "peagle", "serve", folder, *options) as server:
        assert server.process.stdout is not None
        shown = [server.process.stdout.readline().rstrip() for _ in range(3)]
        address = f"http://127.0.0.1:{server.lines[0]['port']}"
        assert shown[0] == f"Serving it's at {address}/v1"
        assert shown[2] == f"Console: {address}/"
        assert "secret" not in "".join(shown)
        if shutil.which("curl"):
            key = os.environ | {"PEAGLE_API_KEY": "secret"}
            run = subprocess.run(
                ["sh", "-c", shown[1]], capture_output=True, text=True, check=True, env=key
            )
            assert json.loads(run.stdout)["choices"][0]["message"]["role"] == "assistant"
        assert httpx2.get(f"{address}/").status_code == 200


def test_a_log_begins_with_what_a_person_needs(folder: Path) -> None:
    """Both streams in one file, as people start servers; then a line with what is drafted."""
    line = [sys.executable, "-m", "peagle", "serve", folder, "--port", 0, "--kv-tokens", 4096]
    command = [*map(str, line), "--method", "lookup", "--served-model-name", "me"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PEAGLE_API_KEY": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        shown = [process.stdout.readline() for _ in range(4)]
    finally:
        process.kill()
    assert [text.split()[0] for text in shown[:3]] == ["Serving", "curl", "Console:"]
    log = json.loads(shown[3])
    assert (log["message"], log["method"]) == ("serving", "lookup")
    assert log["drafts"] == "adaptive" and "k" not in log


def test_no_client_sees_a_path(folder: Path, tmp_path: Path) -> None:
    """A model that is served from a folder is called by the folder's name."""
    place = tmp_path / "qwen2.5-mine"
    shutil.copytree(folder, place)
    with served("-m", "peagle", "serve", place, "--port", 0, "--kv-tokens", 4096) as server:
        assert server.process.stdout is not None
        shown = server.process.stdout.readline()
        client = server.client
        assert [model.id for model in client.models.list()] == ["qwen2.5-mine"]
        asked: Any = {"model": "qwen2.5-mine", "prompt": "the cat", "max_tokens": 4}
        answer = client.completions.create(**asked)
        key = {"authorization": "Bearer secret"}
        root = f"http://127.0.0.1:{server.lines[0]['port']}"
        seen = [shown, answer.model_dump_json(), str(server.lines)]
        seen += [
            httpx2.get(f"{root}/{page}", headers=key).text for page in ("metrics", "v1/models")
        ]
        with pytest.raises(APIStatusError, match="has .* tokens; qwen2.5-mine takes") as long:
            client.completions.create(**asked | {"prompt": [5] * 3000})
        with pytest.raises(APIStatusError, match="there is 'qwen2.5-mine'") as unknown:
            client.completions.create(**asked | {"model": "me"})
        assert unknown.value.status_code == 404
        seen += [str(long.value), str(unknown.value)]
        assert str(tmp_path) not in "".join(seen)
        with pytest.raises(APIStatusError, match="there is 'qwen2.5-mine'"):
            client.completions.create(**asked | {"model": str(place)})


def test_told_to_end(folder: Path) -> None:
    """SIGTERM in the middle of an answer: it is finished, others are sent away, and the process
    ends well."""
    options = ("--port", 0, "--no-speculation", "--served-model-name", "me", "--kv-tokens", 4096)
    asked: Any = {"model": "me", "prompt": "the cat sat", "max_tokens": 1500}
    with served("-m", "peagle", "serve", folder, *options) as server:
        with pytest.raises(APIStatusError, match="temperature"):
            server.client.completions.create(**asked, temperature=-1)
        stream = iter(
            server.client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        )
        first = next(stream)
        server.process.send_signal(signal.SIGTERM)
        while server.health().status_code == 200:  # the signal is on its way
            pass
        assert server.health().json() == {"status": "draining"}
        with pytest.raises(APIStatusError, match="the server ends") as raised:
            server.client.completions.create(**asked)
        assert raised.value.status_code == 503
        parts = [first, *stream]
        assert parts[-1].choices[0].finish_reason == "length"
        assert server.end() == 0
        with pytest.raises(APIConnectionError):
            server.client.models.list()
    start, bad, refused, request = (line for line in server.lines if line.get("path") != "/health")
    assert (start["message"], start["model"], start["context"]) == ("serving", "me", 2048)
    assert (request["path"], request["status"]) == ("/v1/completions", 200)
    assert request["finish_reasons"] == ["length"]
    assert request["usage"]["completion_tokens"] == 1500
    assert (bad["status"], refused["status"]) == (400, 503)
    assert "cat" not in json.dumps(server.lines), "nobody's words are in the log"


def test_a_failed_engine_is_no_good_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peagle.server.run, "serve", lambda *_: False)
    monkeypatch.setattr(peagle.server.run, "log_to_stderr", lambda: None)
    monkeypatch.setattr("sys.argv", ["peagle", "serve", str(folder), "--port", "0"])
    with pytest.raises(SystemExit, match="1"):
        main()


def test_a_failed_start_is_no_good_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of uvicorn return then, others exit with a code."""
    monkeypatch.setattr(Server, "run", lambda self, sockets: None)
    llm = LLM(make_target(), lookup=False, kv_tokens=1024)
    with bind("127.0.0.1", 0) as listening:
        assert not serve(llm, ServerConfig("me"), listening)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.com", ""])
def test_others_need_a_key(host: str) -> None:
    with refused("host"):
        check_host(host, None, allow_no_key=False)
    check_host(host, "key", allow_no_key=False)
    check_host(host, None, allow_no_key=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    check_host(host, None, allow_no_key=False)


def test_bad_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.delenv("PEAGLE_API_KEY", raising=False)
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for field, *args in (
            ("host", "--host", "0.0.0.0"),
            ("api_key", "--api-key", ""),
            ("port", "--port", port),
            ("port", "--port", 70000),
            ("port", "--host", "192.0.2.1", "--allow-no-key"),
            ("max_queue", "--port", 0, "--max-queue", -1),
            ("max_seconds", "--port", 0, "--max-seconds", 0),
            ("max_batch", "--port", 0, "--max-batch", 0),
            ("kv_tokens", "--port", 0, "--kv-tokens", 0),
            ("kv_tokens", "--port", 0, "--kv-tokens", 16),
        ):
            refused_command(capsys, "serve", folder, *args, field=field)


def test_no_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peagle, "server", peagle.server)  # the import makes another one of it
    for name in [name for name in sys.modules if name.startswith(("peagle.server", "fastapi"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setattr("sys.argv", ["peagle", "serve", "anything"])
    with pytest.raises(SystemExit):
        main()
    assert "fastapi is not installed; pip install 'peagle[serve]'" in capsys.readouterr().err
