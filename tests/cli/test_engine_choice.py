"""The engine and the device of commands whose options leave them open."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from json_files import write_lines
from refusals import refused
from runner import invoke
from typer.testing import CliRunner

from peagle.cli import common
from peagle.cli.common import NOT_VLLMS, announced_device, resolve_engine
from peagle.cli.main import app
from peagle.cli.serve import Serving
from peagle.vllm.process import EngineChoice
from peagle.vllm.serve import ServeSettings


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and a vLLM."""
    monkeypatch.setattr(common, "default_engine", lambda _: EngineChoice("vllm", "it is vLLM"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("on_a_gpu")
def test_auto_takes_vllm_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_engine("auto", None, {}) == "vllm"
    assert capsys.readouterr().err == "it is vLLM\n"
    for named in ("native", "vllm"):
        assert resolve_engine(named, None, {}) == named
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("on_a_gpu")
def test_an_option_of_the_native_engine_selects_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve_engine("auto", None, {"max_queue": 1}) == "native"
    why = "vLLM has no limit of waiting requests; without --max-queue, vLLM is used"
    assert capsys.readouterr().err == f"engine: native, because {why}\n"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("options", [(), ("--device", "cuda"), ("--engine", "vllm")])
def test_serve_on_a_gpu(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    seen: list[ServeSettings] = []

    def serve_vllm(asked: ServeSettings) -> None:
        seen.append(asked)
        raise SystemExit

    monkeypatch.setattr("peagle.cli.serve._serve_vllm", serve_vllm)
    CliRunner().invoke(app, ["serve", "owner/model", *options])
    [asked] = seen
    assert (asked.target, asked.max_batch) == ("owner/model", None)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("method", "engine"), [("lookup", "native"), ("eagle3", "vllm"), ("none", "vllm")]
)
def test_serve_on_a_gpu_by_method(
    monkeypatch: pytest.MonkeyPatch, method: str, engine: str
) -> None:
    """Lookup drafts in the native engine only."""
    started: list[str] = []

    def start(name: str) -> NoReturn:
        started.append(name)
        raise SystemExit

    monkeypatch.setattr("peagle.cli.serve._serve_vllm", lambda settings: start("vllm"))
    monkeypatch.setattr(common, "open_llm", lambda *_, **__: start("native"))
    CliRunner().invoke(app, ["serve", "owner/model", "--port", "0", "--method", method])
    assert started == [engine]


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "default_engine", lambda _: EngineChoice("native", "no vLLM"))
    assert resolve_engine("auto", None, {}) == "native"
    assert capsys.readouterr().err == "no vLLM\n"
    assert resolve_engine("auto", None, {"device": "cpu"}) == "native"
    assert capsys.readouterr().err == "", "nothing runs on the GPU"


@pytest.mark.parametrize("name", NOT_VLLMS)
def test_vllm_refuses_what_it_lacks(name: str) -> None:
    """In all commands, with what to do."""
    with refused(name) as error:
        resolve_engine("vllm", None, {name: "cpu"})
    assert error.value.fix


@pytest.mark.usefixtures("on_a_gpu")
def test_a_gpu_is_what_vllm_runs_on() -> None:
    assert resolve_engine("auto", None, {"device": "cuda"}) == "vllm"
    assert resolve_engine("vllm", None, {"device": "auto"}) == "vllm"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_gpu_that_auto_selects_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert announced_device("cuda") == "cuda" and capsys.readouterr().err == ""
    assert announced_device("auto") == "cuda"
    assert "hardly tried on GPUs" in capsys.readouterr().err


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("command", ["generate", "chat", "eval"])
def test_quantize_weights_on_a_gpu(command: str, target: Path, tmp_path: Path) -> None:
    questions = write_lines(tmp_path / "questions.jsonl", {"turns": ["hi"]})
    more = {"generate": ("hi",), "eval": ("--dataset", questions)}.get(command, ())
    with refused("quantize"):
        invoke(command, target, "--quantize", "int8", *more)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("example.com", "http://example.com:80"),
    ],
)
def test_addresses_that_can_be_used(host: str, url: str) -> None:
    first, curl, console = Serving("m", host, 80).lines()
    assert (first, console) == (f"Serving m at {url}/v1", f"Console: {url}/")
    assert "/v1/chat/completions" in curl and "Authorization" not in curl


def test_a_model_without_a_chat_template_completes() -> None:
    curl = Serving("m", "localhost", 80, chat=False).curl()
    assert "/v1/completions " in curl and '"prompt"' in curl
