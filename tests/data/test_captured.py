"""Captured shards: what is written is read, damage is named."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import random_prompts

from peagle.data.captured import (
    KEY,
    Captures,
    Origin,
    Shard,
    difference,
    token_bytes,
    write_shard,
)
from peagle.data.example import Example, fingerprint
from peagle.errors import InputError
from peagle.model.target import Target, TargetOutput
from peagle.train.capture import MAX_HEADER

WIDTH, LAYERS = 32, 3


def documents() -> list[Example]:
    return [Example(ids, [i % 2 == 0 for i in ids]) for ids in random_prompts(5, seed=4)]


DATA = fingerprint(documents())
ORIGIN = Origin("tiny", "c", "w", "t", (1, 2, 3), 1024, 1000, DATA, 5)


def outputs(examples: list[Example]) -> list[TargetOutput]:
    torch.manual_seed(0)
    lengths = [len(e.ids) for e in examples]
    return [TargetOutput(torch.randn(n, WIDTH), torch.randn(n, LAYERS * WIDTH)) for n in lengths]


def save(folder: Path, number: int, documents_of_shard: slice, origin: Origin = ORIGIN) -> Path:
    path = folder / f"shard-{number:05d}.safetensors"
    examples = documents()
    first = documents_of_shard.start
    part = examples[documents_of_shard]
    write_shard(path, origin, first, part, outputs(examples)[documents_of_shard])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five documents in two shards."""
    save(tmp_path, 0, slice(0, 3))
    save(tmp_path, 1, slice(3, 5))
    return tmp_path


@pytest.fixture
def second(folder: Path) -> Path:
    return folder / "shard-00001.safetensors"


def read(folder: Path, chosen: list[int]) -> TargetOutput:
    target = object.__new__(Target)
    vars(target).update(device=torch.device("cpu"), dtype=torch.float32)
    return Captures([folder]).output(chosen, target)


@pytest.mark.parametrize("chosen", [[0], [4], [2, 3], [4, 0, 2]])
def test_round_trip(folder: Path, chosen: list[int]) -> None:
    assert list(Captures([folder])) == documents()
    assert Captures([folder]).parts[0].origin == ORIGIN
    found, wanted = read(folder, chosen), outputs(documents())
    for name in ("hidden", "features"):
        rows = torch.cat([getattr(wanted[i], name) for i in chosen])
        assert torch.equal(getattr(found, name), rows.bfloat16().float())


@contextmanager
def named(path: Path) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expect an error that names a file or folder."""
    with refused() as error:
        yield error
    assert error.value.value == path


def test_only_shards_are_left_readable_for_all(folder: Path) -> None:
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"shard-0000{i}.safetensors" for i in (0, 1)]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}


def test_the_same_shard_has_the_same_bytes(folder: Path, second: Path) -> None:
    before = second.read_bytes()
    second.unlink()
    save(folder, 1, slice(3, 5))
    assert second.read_bytes() == before


def test_tokens_take_the_bytes_that_are_estimated(folder: Path) -> None:
    for shard in Captures([folder]).parts:
        size = shard.path.stat().st_size
        tokens = shard.bounds[-1] * token_bytes(WIDTH, LAYERS) + 4 * (shard.end - shard.first)
        assert 0 < size - tokens <= MAX_HEADER


def test_rows_are_mapped_not_loaded(second: Path) -> None:
    shard = Shard(second)
    whole, part = shard.tensor("hidden"), shard.tensor("hidden")[2:4]
    assert part.data_ptr() == whole.data_ptr() + 2 * WIDTH * whole.element_size()
    assert str(second) in Path("/proc/self/maps").read_text()


def test_a_damaged_shard_is_named_when_it_is_first_used(folder: Path, second: Path) -> None:
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    read(folder, [0, 2])
    with named(second):
        read(folder, [3])


@pytest.mark.parametrize("left", [0, 100, 1000])
def test_a_cut_shard_is_named(folder: Path, second: Path, left: int) -> None:
    second.write_bytes(second.read_bytes()[:left])
    with named(second):
        Captures([folder])


def edited(shard: Path, old: str, new: str) -> None:
    """Change a shard's header by other means."""
    with safe_open(shard, framework="pt") as file:
        text = file.metadata()[KEY]
    save_file(load_file(shard), shard, {KEY: text.replace(old, new)} if old else None)


@pytest.mark.parametrize(
    ("old", "new"), [('"c"', '"d"'), ('"first": 3', '"first": 2'), ("sha256", "sha999"), ("", "")]
)
def test_a_damaged_header_is_named(folder: Path, second: Path, old: str, new: str) -> None:
    edited(second, old, new)
    with named(second) as error:
        Captures([folder])
    assert "header" in error.value.why


def test_a_capture_that_lacks_a_shard_is_not_read(folder: Path) -> None:
    for number, missing in ((0, "1 to 3"), (1, "4 to 5")):
        away = (folder / f"shard-{number:05d}.safetensors").rename(folder / "away")
        with refused("data") as error:
            Captures([folder])
        assert f"documents {missing} of 5 are missing" in error.value.why
        away.rename(folder / f"shard-{number:05d}.safetensors")


def test_an_empty_folder_is_no_capture(tmp_path: Path) -> None:
    with refused("data"):
        Captures([tmp_path])


def test_a_shard_of_another_capture_is_named(folder: Path, second: Path) -> None:
    save(folder, 1, slice(3, 5), replace(ORIGIN, weights_hash="v"))
    with named(second) as error:
        Captures([folder])
    assert "weights_hash" in error.value.why


def test_documents_that_two_shards_have_are_named(folder: Path) -> None:
    extra = save(folder, 2, slice(4, 5))
    with named(extra):
        Captures([folder])


def test_documents_that_are_not_those_captured(tmp_path: Path) -> None:
    save(tmp_path, 0, slice(0, 5), replace(ORIGIN, data="e"))
    with named(tmp_path):
        Captures([tmp_path]).verify()


def test_differences_are_named() -> None:
    assert difference(ORIGIN, replace(ORIGIN, target="moved")) == ""
    assert difference(ORIGIN, replace(ORIGIN, data="e")) == "captured from other documents " + (
        f"(data {DATA[:16]}, now e)"
    )
    assert difference(ORIGIN, replace(ORIGIN, feature_layers=(1, 2))) == (
        "captured with feature layers (1, 2, 3), now (1, 2)"
    )
