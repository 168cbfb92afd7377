"""A capture through vLLM is the one that transformers makes, whatever happens on the way.

A package of our own plays vLLM's part here (fake_vllm), run by the script that runs vLLM;
`tests/vllm` asks the real one.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import save_file
from tiny import make_target, own_answers, save_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle.data.captured import Captures
from peagle.data.example import Example
from peagle.model.loader import load_target
from peagle.model.partial import PartialTarget, load_partial
from peagle.model.target import Target
from peagle.train.capture import CaptureConfig, capture, in_process, plan_capture
from peagle.vllm import capture as vllm_capture
from peagle.vllm.capture import Vllm, last_norm, through_vllm, tokens_in_passing
from peagle.vllm.process import VllmFailed

LAYERS = (0, 2, 3)
SHARD = 25_000  # bytes: four or five documents
WINDOW = 60  # tokens: about three documents
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_target(context=CONTEXT)
    with torch.no_grad():  # norms of one would not show
        for layer in (*target.layers, last_norm(target)):
            for weights in layer.parameters():
                if weights.ndim == 1:
                    weights.add_(torch.linspace(-0.5, 0.5, len(weights)))
    return save_target(target, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder))


@pytest.fixture(scope="module")
def data(target: Target) -> list[Example]:
    """Two are longer than a window, the second as long as the context."""
    data = own_answers(target, 22)
    long = [Example([*range(5, 5 + n)], [True] * n) for n in (WINDOW + 1, CONTEXT)]
    return [*data[:4], *long, *data[4:]]


@pytest.fixture(scope="module")
def computed(folder: Path, data: list[Example]) -> None:
    """By transformers alone, what enters each layer and what leaves the last one."""
    model, left = AutoModelForCausalLM.from_pretrained(folder), list[Tensor]()
    model.model.layers[-1].register_forward_hook(lambda _, __, out: left.append(out))
    states = dict[str, Tensor]()
    for example in data:
        with torch.no_grad():
            ids = torch.tensor([example.ids])
            entered = model(ids, output_hidden_states=True).hidden_states
        every = [*entered[:-1], left.pop()]  # transformers norms its last
        states[",".join(map(str, example.ids))] = torch.cat(every).transpose(0, 1).contiguous()
    (folder / "states").mkdir()
    save_file(states, folder / "states" / "of_documents.safetensors")


@pytest.fixture(autouse=True)
def stand_in(computed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("fake_vllm")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(vllm_capture, "WINDOW", WINDOW)


def settings(folder: Path) -> CaptureConfig:
    return CaptureConfig(folder, feature_layers=LAYERS, shard_bytes=SHARD)


def ids_of(data: list[Example]) -> list[list[int]]:
    return [example.ids for example in data]


def captured(target: Target, data: list[Example], folder: Path, **given: Any) -> Path:
    run = through_vllm(Vllm(Path(sys.executable), **given), target, LAYERS, folder)
    capture(run, data, folder, plan_capture(target, data, settings(folder)))
    return folder


def check_same(made: Path, target: Target, data: list[Example], folder: Path) -> None:
    """As transformers makes it: the same but for a unit of bf16's last place."""
    capture(in_process(target, LAYERS), data, folder, plan_capture(target, data, settings(folder)))
    assert Captures([made]).parts[0].origin == Captures([folder]).parts[0].origin
    assert list(Captures([made])) == data
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in made.glob("shard-*")}
    read, wanted = Captures([made]), Captures([folder])
    for number in range(len(data)):
        one, other = (c.output([number], target) for c in (read, wanted))
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1 / 128, atol=1e-5)
        torch.testing.assert_close(one.features, other.features, rtol=1 / 128, atol=1e-5)


def test_it_is_transformers_capture(tmp_path: Path, target: Target, data: list[Example]) -> None:
    read = captured(target, data, tmp_path / "vllm", tensor_parallel=2)
    asked = json.loads((tmp_path / "vllm" / "asked.json").read_text())
    assert asked["tensor_parallel_size"] == 2
    assert asked["dtype"] == "float32"
    assert asked["max_model_len"] == CONTEXT + 1
    left = {p.name for p in (tmp_path / "vllm").iterdir() if not p.name.startswith("shard-")}
    assert left == {"asked.json"}, "neither files of vLLM nor its log"
    check_same(read, target, data, tmp_path / "transformers")


def test_documents_that_are_sent_together(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    """As many as have a window's tokens, however long another one is; and programs of vLLM's own
    environment come first, as FlashInfer's ninja."""
    list(through_vllm(Vllm(Path(sys.executable)), target, LAYERS, tmp_path)(ids_of(data)))
    asked = json.loads((tmp_path / "asked.json").read_text())
    *windows, last = asked["windows"]
    assert [length for window in (*windows, last) for length in window] == [
        len(example.ids) for example in data
    ]
    for window in windows:
        assert sum(window) >= WINDOW > sum(window[:-1])
    assert asked["path"].split(os.pathsep)[0] == f"{sys.prefix}/bin"


def test_requests_and_replies_larger_than_a_pipe(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short documents: neither side writes while the other one does."""
    count = 1000  # in a window
    pipe = 2**16  # bytes that it holds
    ids = data[0].ids
    assert len(json.dumps([ids] * count)) > pipe
    assert len(str(tmp_path / ".vllm-1" / "0-c0ffee.safetensors")) * count > pipe
    monkeypatch.setattr(vllm_capture, "WINDOW", count * len(ids))
    run = through_vllm(Vllm(Path(sys.executable)), target, LAYERS, tmp_path)
    made = [output.hidden.shape[0] for output in run([ids] * (2 * count))]
    assert made == [len(ids)] * 2 * count


def test_layers_of_the_target_are_not_loaded(
    tmp_path: Path, folder: Path, target: Target, data: list[Example]
) -> None:
    part = load_partial(str(folder))
    assert isinstance(part, PartialTarget)
    check_same(captured(part, data, tmp_path / "vllm"), target, data, tmp_path / "transformers")


def test_a_feature_that_leaves_the_last_layer(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM returns it once, though it is also what the final norm is computed of."""
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", (0, 2, len(target.layers)))
    read = captured(target, data, tmp_path / "vllm")
    check_same(read, target, data, tmp_path / "transformers")


def test_files_go_as_they_come(tmp_path: Path, target: Target, data: list[Example]) -> None:
    allowed, seen = tokens_in_passing([len(e.ids) for e in data]), list[int]()
    assert allowed == 2 * (WINDOW + CONTEXT)
    row = target.config.hidden_size * (len(LAYERS) + 1) * target.dtype.itemsize
    run = through_vllm(Vllm(Path(sys.executable)), target, LAYERS, tmp_path)

    def tokens_on_the_disk() -> int:
        files = (tmp_path / ".vllm-1").glob("*.safetensors")
        return sum(f.stat().st_size // row for f in files if f.exists())

    for number, _ in enumerate(run(ids_of(data)), 1):
        # The documents that follow are run meanwhile: their files come without being asked for.
        deadline = time.monotonic() + 60
        while number < len(data) and not tokens_on_the_disk() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(tokens_on_the_disk())
    assert all(seen[:-1]), "nothing was run meanwhile"
    assert len(seen) == len(data)
    assert max(seen) < allowed + 8, "their headers count a little"
    assert not (tmp_path / ".vllm-1").exists()


def test_a_killed_vllm_is_named_and_the_capture_goes_on(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_VLLM_ENDS", "13")
        with pytest.raises(VllmFailed, match=r"vLLM ended with code -9: .*vllm-1\.log"):
            captured(target, data, tmp_path / "vllm")
    assert not (tmp_path / "vllm" / ".vllm-1").exists()
    plan = plan_capture(target, data, settings(tmp_path / "vllm"))
    assert 0 < len(plan.done) < len(plan.shards)
    shutil.copytree(tmp_path / "vllm", tmp_path / "both")
    read = captured(target, data, tmp_path / "vllm")
    assert not (tmp_path / "vllm" / "vllm-1.log").exists()
    check_same(read, target, data, tmp_path / "transformers")
    capture(in_process(target, LAYERS), data, tmp_path / "both", plan)
    check_same(tmp_path / "both", target, data, tmp_path / "transformers")


def test_two_runs_do_not_make_the_same_part(
    tmp_path: Path, target: Target, data: list[Example]
) -> None:
    """A second run leaves the files of the first alone; those that a killed one left go."""
    left = tmp_path / ".vllm-1" / "left.safetensors"
    left.parent.mkdir()
    left.touch()
    run, other = (
        through_vllm(Vllm(Path(sys.executable)), target, LAYERS, tmp_path, part) for part in (1, 2)
    )
    first = run(ids_of(data))
    next(first)
    assert not left.exists()
    with refused("output"):
        next(run(ids_of(data)))
    assert len(list(other(ids_of(data)))) == len(data)
    assert len(list(first)) == len(data) - 1
    assert not left.parent.exists()


def test_vllm_is_not_started_when_nothing_is_left(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_capture(target, data[:4], settings(tmp_path))
    capture(in_process(target, LAYERS), data[:4], tmp_path, plan)
    monkeypatch.setattr(vllm_capture, "SCRIPT", "nowhere.py")
    captured(target, data[:4], tmp_path)


def test_a_refusal_of_vllm_is_shown(
    tmp_path: Path, folder: Path, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(str(folder))
    (folder / "refused").touch()
    try:
        with pytest.raises(VllmFailed, match="code 1: ValueError: no room for the model"):
            captured(target, data, tmp_path)
    finally:
        (folder / "refused").unlink()
    assert "no room for the model" in (tmp_path / "vllm-1.log").read_text()


def test_files_in_passing_need_room(
    tmp_path: Path, target: Target, data: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_capture(target, data, settings(tmp_path))
    free = type("Usage", (), {"free": plan.bytes})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    assert plan_capture(target, data, settings(tmp_path)).bytes == plan.bytes
    with refused("output"):
        plan_capture(
            target, data, settings(tmp_path), passing=tokens_in_passing([len(e.ids) for e in data])
        )
