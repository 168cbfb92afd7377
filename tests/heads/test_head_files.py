"""The index decides which files of a head's folder are read; contradictions are named."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corrected_heads import corrected
from refusals import check_text
from safetensors.torch import load_file, save_file
from tiny_heads import head_config, make_head, tiny_target
from torch import Tensor

from peagle.errors import InputError
from peagle.heads.format import read_tensors
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter

INDEX = "model.safetensors.index.json"
ONE, TWO, SINGLE = "a.safetensors", "b.safetensors", "model.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(params=["", "correction"], ids=["head", "correction"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of tensors in two shards with an index: a head's own, or its correction's."""
    drafter = corrected(make_head(head_config(depths=4)), candidates=5)
    save_drafter(drafter, tmp_path / "head", dtype=None)
    folder: Path = tmp_path / "head" / request.param
    split(folder)
    return folder


def split(folder: Path) -> None:
    """Two shards and an index of them in the place of model.safetensors."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    shards = {ONE: names[:2], TWO: names[2:]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    write_index(folder, {name: file for file, own in shards.items() for name in own})
    (folder / SINGLE).unlink()


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_map(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def head_of(folder: Path) -> Path:
    return folder.parent if folder.name == "correction" else folder


def read(folder: Path) -> dict[str, Tensor]:
    return read_tensors(head_of(folder))


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        read(folder)
    check_text(str(error.value))
    return str(error.value)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_the_index_is_obeyed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other files hold the same tensors with other values: one line tells that they are there."""
    wanted = read(folder)
    assert caplog.records == []
    others = {name: torch.zeros(1) for file in (ONE, TWO) for name in load_file(folder / file)}
    save_file(others, folder / SINGLE)
    save_file({"extra": torch.zeros(1)}, folder / "model-00003-of-00003.safetensors")
    assert same(read(folder), wanted)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    line = record.getMessage()
    assert SINGLE in line and "model-00003-of-00003.safetensors" in line and ONE not in line


def test_a_tensor_comes_from_the_shard_that_the_index_names(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = read(folder)
    name = min(load_file(folder / TWO))
    save_file(load_file(folder / ONE) | {name: torch.zeros(1)}, folder / ONE)
    assert same(read(folder), wanted)
    [record] = caplog.records
    assert ONE in record.getMessage() and name in record.getMessage()


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / TWO).unlink()
    assert TWO in refused(folder) and INDEX in refused(folder)
    (folder / ONE).unlink()
    assert ONE in refused(folder), "also when no shard is left"


def test_a_tensor_missing_in_its_shard_is_named(folder: Path) -> None:
    tensors = load_file(folder / TWO)
    name = min(tensors)
    del tensors[name]
    save_file(tensors, folder / TWO)
    line = refused(folder)
    assert TWO in line and name in line


def test_a_tensor_in_two_files_is_named_with_both(folder: Path) -> None:
    (folder / INDEX).unlink()
    name = min(load_file(folder / TWO))
    save_file(load_file(folder / ONE) | {name: torch.zeros(1)}, folder / ONE)
    line = refused(folder)
    assert name in line and ONE in line and TWO in line


def test_without_an_index_every_file_is_read(folder: Path) -> None:
    wanted = read(folder)
    (folder / INDEX).unlink()
    (folder / ONE).rename(folder / SINGLE)
    assert same(read(folder), wanted)


@pytest.mark.parametrize(
    "other",
    [
        "model.norm.weight",
        "model.layers.0.hidden_norm.weight",
        "midlayer.hidden_norm.weight",
        "correction.token.weight",
    ],
)
def test_two_names_of_one_tensor_are_named(other: str, tmp_path: Path) -> None:
    drafter = corrected(make_head(head_config(depths=4)), candidates=5)
    save_drafter(drafter, tmp_path / "head")
    save_file({other: torch.zeros(1)}, tmp_path / "head" / "more.safetensors")
    line = refused(tmp_path / "head")
    assert other in line and ("more.safetensors" in line or other.startswith("correction"))


@pytest.mark.parametrize(
    "name",
    ["/etc/a.safetensors", "../a.safetensors", "sub/a.safetensors", "..", "", "a.bin", 5, None, []],
    ids=repr,
)
def test_files_outside_the_folder_are_refused(name: Any, folder: Path) -> None:
    for place in (folder.parent, folder / "sub"):
        place.mkdir(exist_ok=True)
        save_file(load_file(folder / ONE), place / ONE)
    tensor = min(load_file(folder / ONE))
    write_index(folder, weight_map(folder) | {tensor: name})
    line = refused(folder)
    assert INDEX in line and repr(name) in line


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_refused(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)
    assert INDEX in refused(folder)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"x")])
def test_a_shard_that_cannot_be_read_is_named(damage: Damage, folder: Path) -> None:
    """Such as a link of a hub's cache whose file is gone."""
    (folder / TWO).rename(folder / "away")
    (folder / TWO).symlink_to(folder / "away")
    damage(folder / "away")
    assert TWO in refused(folder)


def test_saving_over_shards_leaves_none(tmp_path: Path) -> None:
    """Neither an index nor shards of a head that was there before."""
    save_drafter(make_head(head_config()), tmp_path / "head")
    split(tmp_path / "head")
    second = make_head(head_config(), seed=1)
    save_drafter(second, tmp_path / "head", dtype=None)
    names = {file.name for file in (tmp_path / "head").iterdir()}
    assert names == {"config.json", SINGLE}
    loaded = load_drafter(tmp_path / "head", tiny_target())
    assert torch.equal(loaded.fc.weight, second.fc.weight)
