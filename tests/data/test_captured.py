"""Captured shards: what is written is read, damage is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import random_prompts

from peagle.data.captured import (
    Captured,
    Manifest,
    Origin,
    difference,
    read_manifest,
    write_manifest,
)
from peagle.data.example import Example, fingerprint
from peagle.data.shard import OpenShard, token_bytes, write_shard
from peagle.errors import InputError
from peagle.model.target import TargetOutput

WIDTH, LAYERS = 32, 3


def documents() -> list[Example]:
    return [Example(ids, [i % 2 == 0 for i in ids]) for ids in random_prompts(5, seed=4)]


DATA = fingerprint(documents())
ORIGIN = Origin("tiny", "c", "w", "t", (1, 2, 3), 1024, 1000, DATA, 5)


def outputs(examples: list[Example]) -> list[TargetOutput]:
    torch.manual_seed(0)
    lengths = [len(e.ids) for e in examples]
    return [TargetOutput(torch.randn(n, WIDTH), torch.randn(n, LAYERS * WIDTH)) for n in lengths]


def saved(folder: Path) -> Captured:
    """Five documents in two shards."""
    examples = documents()
    said = outputs(examples)
    shards = tuple(
        write_shard(folder / f"shard-{i:05d}.safetensors", examples[a:b], said[a:b])
        for i, (a, b) in enumerate([(0, 3), (3, 5)])
    )
    write_manifest(folder, Manifest(ORIGIN, shards))
    return Captured(folder)


class Float32:
    """As much of a target as reading asks for."""

    device, dtype = torch.device("cpu"), torch.float32


def test_round_trip(tmp_path: Path) -> None:
    captured, said = saved(tmp_path), outputs(documents())
    assert captured.examples() == documents()
    for chosen in ([0], [4], [2, 3], [4, 0, 2]):
        read = captured.output(chosen, Float32())  # type: ignore[arg-type]
        for name in ("hidden", "features"):
            rows = torch.cat([getattr(said[i], name) for i in chosen])
            assert torch.equal(getattr(read, name), rows.bfloat16().float())


def test_manifest_round_trip(tmp_path: Path) -> None:
    captured = saved(tmp_path)
    assert read_manifest(tmp_path) == Manifest(ORIGIN, captured.shards)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "capture.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ], "nothing temporary is left"
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1


def test_tokens_take_the_bytes_that_are_estimated(tmp_path: Path) -> None:
    for shard in saved(tmp_path).shards:
        header = int.from_bytes((tmp_path / shard.file).read_bytes()[:8], "little") + 8
        wanted = shard.tokens * token_bytes(WIDTH, LAYERS) + 4 * shard.documents
        assert shard.bytes == header + wanted
        assert header <= 1024


def test_rows_are_mapped_not_loaded(tmp_path: Path) -> None:
    shard = OpenShard(tmp_path, saved(tmp_path).shards[0])
    whole, part = shard.rows("hidden"), shard.rows("hidden", 2, 4)
    assert part.data_ptr() == whole.data_ptr() + 2 * WIDTH * whole.element_size()
    maps = Path("/proc/self/maps").read_text()
    assert str(shard.path) in maps


def test_a_damaged_shard_is_named_when_it_is_first_used(tmp_path: Path) -> None:
    saved(tmp_path)
    bad = tmp_path / "shard-00001.safetensors"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    captured = Captured(tmp_path)
    captured.output([0, 2], Float32())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"shard-00001\.safetensors: is damaged"):
        captured.output([3], Float32())  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [None, 0, 100])
def test_a_missing_or_cut_shard_is_named(tmp_path: Path, left: int | None) -> None:
    captured = saved(tmp_path)
    bad = tmp_path / "shard-00001.safetensors"
    content = bad.read_bytes()
    bad.unlink()
    if left is not None:
        bad.write_bytes(content[:left])
    with pytest.raises(InputError, match=r"shard-00001\.safetensors: cannot be read"):
        captured.examples()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "target": "tiny"}'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "capture.json").write_text(text)
    with pytest.raises(InputError, match=r"capture\.json: not what `peagle data capture` writes"):
        Captured(tmp_path)


def test_a_manifest_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text('{"format": 2}')
    with pytest.raises(InputError, match="format 2, this version reads 1"):
        Captured(tmp_path)


def test_a_capture_in_fp8_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "capture.json"
    record = json.loads(file.read_text())
    assert record["dtype"] == "bfloat16"
    file.write_text(json.dumps({**record, "dtype": "fp8"}))
    with pytest.raises(InputError) as error:
        Captured(tmp_path)
    assert str(error.value) == (
        f"{file}: dtype fp8, this version reads bfloat16: capture it again into another folder"
    )


def test_an_unfinished_capture_is_not_read(tmp_path: Path) -> None:
    first = saved(tmp_path).shards[0]
    write_manifest(tmp_path, Manifest(ORIGIN, (first,)))
    with pytest.raises(InputError, match="3 of its 5 documents are captured: finish it"):
        Captured(tmp_path)


def test_documents_that_are_not_those_captured(tmp_path: Path) -> None:
    captured = saved(tmp_path)
    write_manifest(tmp_path, Manifest(replace(ORIGIN, data="e"), captured.shards))
    with pytest.raises(InputError, match=r"holds other documents than capture\.json says"):
        Captured(tmp_path).examples()


def test_differences_are_named() -> None:
    assert difference(ORIGIN, replace(ORIGIN, target="moved")) == ""
    assert difference(ORIGIN, replace(ORIGIN, data="e")) == "captured from other documents " + (
        f"(data {DATA[:16]}, now e)"
    )
    assert difference(ORIGIN, replace(ORIGIN, feature_layers=(1, 2))) == (
        "captured with feature layers (1, 2, 3), now (1, 2)"
    )
