"""Quantised weights outlive the process that laid them out, and bad files do no harm."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_target, save_target

from peagle.backends.cpu import packed as packed_module
from peagle.backends.cpu import target as cpu_target
from peagle.backends.cpu.library import load
from peagle.backends.cpu.matrix import Place, Weights
from peagle.backends.cpu.packed import keep_packed
from peagle.backends.cpu.pages import LINE
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.described import DescribedTarget

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of packed weights of an empty cache."""
    load()  # from the usual cache: not to compile it again
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "packed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_target(make_target(), tmp_path / "tiny")


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The kinds in which weights were laid out so far."""
    kinds = list[str | None]()
    lay_out: Callable[..., Weights] = cpu_target.quantize_weights

    def counting(weight: torch.Tensor, kind: str | None, place: Place) -> Weights:
        kinds.append(kind)
        return lay_out(weight, kind, place)

    monkeypatch.setattr(cpu_target, "quantize_weights", counting)
    return kinds


def answer(folder: Path, kind: str | None) -> list[int]:
    llm = LLM(str(folder), quantize=kind, lookup=False, device="cpu")
    [completion] = llm.generate([[5, 6, 7]], GREEDY)
    return completion.token_ids


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_next_start_lays_out_nothing(
    folder: Path, packed: Path, layouts: list[str | None], kind: str
) -> None:
    before = answer(folder, kind)
    assert layouts.count("int8") == (29 if kind == "int8" else 1)
    layouts.clear()
    assert answer(folder, kind) == before
    assert not layouts
    assert len(list(packed.iterdir())) == 1


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_kept_weights_begin_at_cache_lines(folder: Path, packed: Path, kind: str) -> None:
    """Vectors of 64 bytes are read from them, in places by instructions that end elsewhere."""
    llm = LLM(str(folder), quantize=kind, lookup=False, device="cpu")
    assert isinstance(llm.target, DescribedTarget)
    assert list(packed.iterdir())
    kept = keep_packed(llm.target, lambda _: pytest.fail("nothing was kept"))
    assert len(kept) == 29
    assert all(each.data.data_ptr() % LINE == 0 for each in kept.values())


def test_each_kind_and_only_these_are_kept(
    folder: Path, packed: Path, layouts: list[str | None]
) -> None:
    answer(folder, "int8")
    answer(folder, "int4")
    answer(folder, None)
    assert len(list(packed.iterdir())) == 2
    assert layouts.count(None) == 29


def test_two_first_starts_at_once(
    folder: Path,
    packed: Path,
    layouts: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each writes a file of its own, whole, and one of them stays."""
    save = packed_module.save_file

    def beside_another(*given: Any) -> None:
        save(*given)
        with monkeypatch.context() as another:
            another.setattr(packed_module, "save_file", save)
            another.setattr(os, "getpid", lambda: 2**22)
            answer(folder, "int8")

    with monkeypatch.context() as patch:
        patch.setattr(packed_module, "save_file", beside_another)
        before = answer(folder, "int8")
    assert "are not kept" not in caplog.text
    layouts.clear()
    assert answer(folder, "int8") == before
    assert not layouts
    assert len(list(packed.iterdir())) == 1


def test_what_killed_processes_were_writing_goes(folder: Path, packed: Path) -> None:
    """Gigabytes; not what another one writes. In a container the next process has the same id."""
    for pid in (2**22, os.getpid(), os.getppid()):  # no id is so large
        (packed / f".making-{pid}-x").mkdir(parents=True)
        (packed / f".making-{pid}-x" / ".tmpAbCdEf").write_bytes(b"half")
    answer(folder, "int8")
    [other] = packed.glob(".making-*")
    assert other.name == f".making-{os.getppid()}-x" and len(list(packed.iterdir())) == 2


def test_other_weights_are_laid_out_anew(folder: Path, layouts: list[str | None]) -> None:
    answer(folder, "int8")
    save_target(make_target(seed=1), folder)
    layouts.clear()
    answer(folder, "int8")
    assert layouts


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_file_cut_short_is_made_again(
    folder: Path, packed: Path, layouts: list[str | None], length: int
) -> None:
    before = answer(folder, "int8")
    [file] = packed.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:length])
    layouts.clear()
    assert answer(folder, "int8") == before
    assert layouts
    assert [each.read_bytes() for each in packed.iterdir()] == [whole]


def test_the_file_of_another_version_goes(folder: Path, packed: Path) -> None:
    answer(folder, "int8")
    [file] = packed.iterdir()
    source, _, content = file.stem.split("-")
    old = file.rename(packed / f"{source}-0123456789abcdef-{content}.safetensors")
    answer(folder, "int8")
    assert old not in packed.iterdir() and file.is_file()


def test_the_file_of_another_processor_stays(
    folder: Path, packed: Path, layouts: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several kinds of machines may share a home."""
    answer(folder, "int8")
    with monkeypatch.context() as there:
        for module in ("packed", "library"):
            there.setattr(f"peagle.backends.cpu.{module}.processor", lambda: "another")
        answer(folder, "int8")
    layouts.clear()
    answer(folder, "int8")
    assert not layouts and len(list(packed.iterdir())) == 2


def test_other_users_may_read_it(folder: Path, packed: Path) -> None:
    answer(folder, "int8")
    [file] = packed.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644


def test_without_room_it_decodes_all_the_same(
    folder: Path, packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(folder, "int8")
    for file in packed.iterdir():
        file.unlink()
    packed.rmdir()
    packed.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert answer(folder, "int8") == expected
    assert "quantised weights are not kept" in caplog.text
    assert packed.read_text() == "in the way"
