"""`peagle data capture`, and `peagle train` on what it made."""

import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from json_files import read_json, write_lines
from runner import SMALL, Words, invoke, metrics, save_target
from tiny import METHODS

from peagle.cli.common import screen
from peagle.data.captured import Captures
from peagle.model.describe import INDEX
from peagle.model.loader import load_target
from peagle.model.target import Target, TargetOutput
from peagle.train.capture import in_process
from peagle.vllm.process import VllmFailed

VLLM = ("--engine", "vllm", "--vllm-python")
STEPS = (*SMALL, "--steps", 3)


def capture(target: Path, data: Path) -> Words:
    """A command that lacks an output."""
    return ("data", "capture", target, "--data", data, "--shard-mb", 0.05, "--output")


@pytest.fixture(scope="module")
def capturing(target: Path, answers: Path) -> Words:
    return capture(target, answers)


@pytest.fixture(scope="module")
def folder(capturing: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("capture") / "new"
    said = invoke(*capturing, made).stderr
    assert "24 documents, " in said
    assert " tokens: 0.2 MB on disk" in said
    assert f"train with --data {made}" in said
    return made


def test_documents_are_cut_at_the_context(tmp_path: Path) -> None:
    """Longer documents are never served; the last position is that of vLLM's answer."""
    target = save_target(tmp_path / "target", context=32)
    data = write_lines(tmp_path / "long.jsonl", {"prompt_ids": [5, 6], "answer_ids": [7] * 60})
    invoke(*capture(target, data), tmp_path / "made")
    [document] = list(Captures([tmp_path / "made"]))
    assert len(document.ids) == 31
    invoke("train", target, "--data", data, "--output", tmp_path / "run", *SMALL, "--steps", 1)
    assert metrics(tmp_path / "run")[0]["answer_tokens"] == 30


def test_a_capture_is_trained_on(target: Path, answers: Path, folder: Path, tmp_path: Path) -> None:
    assert len(list(folder.glob("shard-*.safetensors"))) > 2
    for name, data in (("online", answers), ("stored", folder)):
        invoke("train", target, "--data", data, "--output", tmp_path / name, *STEPS)
    online, stored = (metrics(tmp_path / name) for name in ("online", "stored"))
    for here, there in zip(online, stored, strict=True):
        assert here["answer_tokens"] == there["answer_tokens"]
        assert here["loss"] == pytest.approx(there["loss"], rel=0.003)
    command = ("train", target, "--data", folder, "--output", tmp_path / "stored", *SMALL)
    invoke(*command, "--steps", 5, "--resume")
    assert len(metrics(tmp_path / "stored")) == 5


@pytest.mark.parametrize("method", METHODS)
def test_layers_of_the_target_are_not_run(
    target: Path, folder: Path, heads: dict[str, Path], tmp_path: Path, refused, method: str
) -> None:
    """Training and export read a few of the files of a large target; norms of features take their
    size from the capture."""
    copy = shutil.copytree(target, tmp_path / "target")
    load_target(str(target)).model.save_pretrained(copy, max_shard_size="20kB")
    (copy / "model.safetensors").unlink(missing_ok=True)
    places = read_json(copy / INDEX)["weight_map"]
    needed = {file for name, file in places.items() if ".layers.1." not in name}
    for file in set(places.values()) - needed:
        (copy / file).unlink()
    train = ("train", copy, "--data", folder, *STEPS, "--method", method)
    invoke(*train, "--output", tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 3
    export = ("export", heads[method], tmp_path / "exported", "--to", "vllm", "--target", copy)
    invoke(*export)
    (copy / places["lm_head.weight"]).unlink()
    refused(*train, "--output", tmp_path / "other", field="target")
    shutil.rmtree(tmp_path / "exported")
    refused(*export, field="target")
    assert not (tmp_path / "other").exists() and not (tmp_path / "exported").exists()


def test_what_is_there_is_said(capturing: Words, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "shard-00000.safetensors").unlink()
    said = invoke(*capturing, copy).stderr
    assert "17 documents are there: 0.1 MB to write" in said


def test_its_layers_are_the_heads(target: Path, capturing: Words, tmp_path: Path, refused) -> None:
    made = tmp_path / "made"
    invoke(*capturing, made, "--feature-layers", "1,2")
    invoke("train", target, "--data", made, "--output", tmp_path / "out", *STEPS)
    assert len(metrics(tmp_path / "out")) == 3
    command = ("train", target, "--data", made, "--output", tmp_path / "other", *STEPS)
    line = refused(*command, "--feature-layers", "1,3,5")
    assert f"{made}: captured with feature layers (1, 2), now (1, 3, 5)" in line


def test_other_lengths_are_refused(target: Path, folder: Path, tmp_path: Path, refused) -> None:
    command = ("train", target, "--data", folder, "--output", tmp_path, *STEPS)
    refused(*command, "--max-length", 64, field="max_length")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--shard-mb", 0), "shard_mb"),
        (("--shard-mb", "nan"), "shard_mb"),
        (("--shard-mb", "inf"), "shard_mb"),
        (("--feature-layers", "3,1"), None),
        (("--feature-layers", "1,9"), None),
        (("--engine", "sglang"), "engine"),
        (("--tensor-parallel-size", 2), "tensor_parallel_size"),
        ((*VLLM, sys.executable), None),
        (("--data", "nowhere.jsonl"), "data"),
        (("--output", __file__), "output"),
        (("--part", "5/4"), "part"),
        (("--part", "2"), "part"),
        (("--part", "a/b"), "part"),
    ],
)
def test_bad_options(capturing: Words, tmp_path: Path, refused, options, field) -> None:
    refused(*capturing, tmp_path / "made", *options, field=field)
    assert not (tmp_path / "made").exists()


def test_the_devices_of_vllm(capturing: Words, tmp_path: Path, refused) -> None:
    line = refused(*capturing, tmp_path, "--engine", "vllm", "--device", "cuda", field="device")
    assert line.endswith("vLLM finds its devices itself; leave it out"), "there is no native engine"


def test_a_disk_that_refuses(
    capturing: Words, tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("peagle.train.capture.write_shard", full)
    monkeypatch.setattr(screen, "quiet", True)
    line = refused(*capturing, tmp_path, field="output")
    assert "make room" in line and "earlier shards" in line


def test_a_vllm_that_ends_is_a_failure(
    target: Path, capturing: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: vllm/test_vllm_capture.py. Our process has no layers of the target."""

    def ends(_: object, loaded: Target, layers: tuple[int, ...], *__: object) -> Any:
        assert not loaded.runs
        whole = load_target(str(target))

        def run(documents: list[list[int]]) -> Iterator[TargetOutput]:
            yield from islice(in_process(whole, layers)(documents), 20)
            raise VllmFailed("vLLM ended with code -9")

        return run

    monkeypatch.setattr("peagle.cli.capture.through_vllm", ends)
    monkeypatch.setattr("peagle.cli.capture.look", lambda _: None)
    said = invoke(*capturing, tmp_path, *VLLM, sys.executable, code=1).stderr
    [line] = [line for line in said.splitlines() if line.startswith("peagle: ")]
    assert "vLLM ended with code -9" in line and "run the same command to continue" in line
    said = invoke(*capturing, tmp_path).stderr
    assert "documents are there: " in said, "transformers goes on where vLLM ended"
    assert len(list(Captures([tmp_path]))) == 24
