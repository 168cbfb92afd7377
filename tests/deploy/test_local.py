"""A process of its own on this machine; the engine is a stand-in that speaks its HTTP."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from stand_ins import entry

from peagle.catalog import find_entry
from peagle.deploy import local
from peagle.deploy.local import Running
from peagle.deploy.spec import DeployFailed, Spec, make_spec
from peagle.errors import InputError

SERVER = Path(__file__).with_name("fake_server.py")
OTHERS = set[psutil.Process]()  # that earlier tests of this process have left


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    OTHERS.update(psutil.Process().children(recursive=True))
    yield tmp_path
    local.delete("mine")  # of a test that failed


@pytest.fixture
def spec() -> Spec:
    return make_spec("mine", entry(), None, remote=False)


def start(spec: Spec, kind: str = "healthy", wait: float = 30) -> Running:
    port = local.free_port(0)
    return local.start(spec, [sys.executable, str(SERVER), str(port), kind], port, wait)


def children() -> list[psutil.Process]:
    running = psutil.Process().children(recursive=True)
    own = [child for child in running if child not in OTHERS]
    return [child for child in own if child.status() != psutil.STATUS_ZOMBIE]


def test_a_deployment_and_its_end(spec: Spec, home: Path) -> None:
    running = start(spec)
    assert local.find("mine") == running
    found = local.status("mine")
    assert found == {"name": "mine", "status": "healthy", "url": running.url, "pid": running.pid}
    assert httpx2.get(f"{running.url}/health").status_code == 200
    assert local.logs("mine", 10) == ["starting with a key", "asked mine user"]
    assert local.logs("mine", 1) == ["asked mine user"]
    assert running.key not in " ".join(psutil.Process(running.pid).cmdline())
    [state] = home.rglob("state.json")
    assert state.stat().st_mode & 0o077 == 0  # the key is in it
    assert local.delete("mine")
    assert list(home.rglob("state.json")) == [] and children() == []
    assert local.status("mine") == {"name": "mine", "status": "not running"}
    assert not local.delete("mine")


def test_a_running_model_is_left_as_it_is(spec: Spec) -> None:
    running = start(spec)
    assert start(spec) == running
    assert len(children()) == 1


def test_a_process_that_ends_shows_its_last_lines(spec: Spec, home: Path) -> None:
    why = "mine ended with code 1; its last lines:\nstarting with a key\nno such model"
    with pytest.raises(DeployFailed) as failed:
        start(spec, "dead")
    assert str(failed.value) == why
    assert list(home.rglob("state.json")) == []
    assert local.logs("mine", 1) == ["no such model"]  # to be read later


@pytest.mark.parametrize(
    ("kind", "why"), [("unhealthy", "was not healthy after 1 s"), ("dumb", "gave no answer: .*500")]
)
def test_a_process_that_does_not_serve_is_ended(kind: str, why: str, spec: Spec) -> None:
    with pytest.raises(DeployFailed, match=f"mine {why}"):
        start(spec, kind, wait=1)
    assert children() == [] and local.find("mine") is None


def test_interrupted_nothing_is_left(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Running) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "_ask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(spec)
    assert children() == [] and local.find("mine") is None


def test_a_later_process_of_the_same_number_is_not_ours(spec: Spec, home: Path) -> None:
    running = start(spec)
    [state] = home.rglob("state.json")
    local.delete("mine")
    state.parent.mkdir(parents=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = {"name": "mine", "pid": other.pid, "started": running.started - 100}
        state.write_text(json.dumps({**record, "url": running.url, "key": "sk"}))
        assert local.find("mine") is None and not local.delete("mine")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}: Address already in use; 0 is any"):
            local.free_port(port)


def test_commands(spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    demo = make_spec("smollm2-135m", find_entry("smollm2-135m"), None, remote=False)
    ours = [sys.executable, "-m", "peagle", "serve"]
    assert local.command(demo, 1)[:5] == [*ours, "smollm2-135m"]
    assert "--device" not in local.command(spec, 1)  # no GPU here
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert local.command(spec, 1)[4:9] == [
        "owner/model",
        "--head",
        "owner/head",
        "--device",
        "cuda",
    ]
    monkeypatch.delenv("PEAGLE_VLLM_PYTHON", raising=False)
    theirs = make_spec("smollm2-135m", find_entry("smollm2-135m"), "vllm", remote=False)
    with pytest.raises(InputError, match="vLLM is not installed there"):
        local.command(theirs, 1)
    monkeypatch.setattr(local, "look", lambda python: None)
    assert local.command(theirs, 1)[:7] == [*ours, "smollm2-135m", "--engine", "vllm"]
    assert local.command(theirs, 1)[-2:] == ["--port", "1"]
    flags = {"max-model-len": 64, "async-scheduling": False}
    big = make_spec("mine", entry(vllm_flags=flags, gpus=2), "vllm", remote=False)
    behind = ["--max-model-len", "64", "--no-async-scheduling", "--tensor-parallel-size", "2"]
    assert local.command(big, 1)[-10:] == ["--head", "owner/head", "--k", "5", "--", *behind]
