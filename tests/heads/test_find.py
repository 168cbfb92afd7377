"""A head is found by a folder, a hub id, or its target's catalog entry."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused

from peagle.catalog import PACKAGED
from peagle.errors import InputWarning
from peagle.heads.find import Head, find_head
from peagle.heads.format import head_folder

TARGET = "smollm2-135m"
KEYS = {"p-eagle": {"ptd_token_id": 3}, "eagle3": {}}


def make(folder: Path, method: str = "p-eagle", depths: int | None = None) -> Path:
    """A head, as far as it takes to be found."""
    folder.mkdir(parents=True)
    keys = {**KEYS[method], "peagle": {"method": method, "depths": depths}}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installation, which has no heads."""
    catalog = tmp_path / "peagle" / "catalog.yaml"
    catalog.parent.mkdir()
    catalog.write_text(PACKAGED.read_text())
    monkeypatch.delenv("PEAGLE_CATALOG", raising=False)
    monkeypatch.setattr("peagle.catalog.PACKAGED", catalog)
    monkeypatch.setattr("peagle.catalog.HEADS_PACKAGE", "no_such_package")
    return tmp_path


def test_a_named_head_is_taken(tmp_path: Path) -> None:
    folder = make(tmp_path / "head", depths=5)
    head = Head(str(folder), folder, "p-eagle", 5)
    assert find_head("unknown", str(folder)) == head
    assert find_head(TARGET, str(folder), "p-eagle") == head
    assert find_head(TARGET, str(folder), "none") is None


def test_without_a_record_k_is_seven(tmp_path: Path) -> None:
    head = find_head("unknown", str(make(tmp_path / "head")))
    assert head is not None and head.k == 7


def test_a_head_of_another_method_is_refused(tmp_path: Path) -> None:
    """By the name of the option that named it."""
    with refused("a"):
        find_head(TARGET, str(make(tmp_path / "head", "eagle3")), "p-eagle", field="a")


def test_no_head_is_known_for_an_unknown_target() -> None:
    assert find_head("unknown") is None
    with refused("a"):
        find_head("unknown", method="eagle3", field="a")


def test_an_unknown_method_is_refused() -> None:
    with refused("method"):
        find_head(TARGET, method="medusa")


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, str | None]]()

    def download(hub_id: str, revision: str | None, **_: Any) -> Path:
        asked.append((hub_id, revision))
        return folder

    folder = make(tmp_path / "head", depths=5)
    monkeypatch.setattr("peagle.model.loader.snapshot_download", download)
    assert find_head("unknown", "me/head@v2") == Head("me/head@v2", folder, "p-eagle", 5)
    known = find_head("Qwen/Qwen3-8B", method="p-eagle")
    assert known is not None and known.name == "RedHatAI/Qwen3-8B-speculator.peagle"
    assert asked == [("me/head", "v2"), (known.name, None)]


@pytest.mark.parametrize("target", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"])
def test_a_target_whose_only_head_is_of_another_method(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head drafts, as in a deployment, unless P-EAGLE is asked for."""
    folder = make(tmp_path / "head", "eagle3")
    monkeypatch.setattr("peagle.model.loader.snapshot_download", lambda *_, **__: folder)
    name = "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"
    assert find_head(target) == Head(name, folder, "eagle3", 3)
    with refused("head"):
        find_head(target, method="p-eagle")


def test_an_unreachable_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, revision: str | None, **__: Any) -> str:
        raise OSError(f"no route to revision {revision}\nand more")

    monkeypatch.setattr("peagle.model.loader.snapshot_download", offline)
    monkeypatch.setattr("peagle.model.loader.reached", lambda: True)
    with refused("head") as error:
        head_folder("owner/name@v2")
    assert "no route to revision v2" in error.value.why


@pytest.mark.parametrize("name", ["./nowhere", "just-a-name", "a/b/c", "~/nowhere"])
def test_neither_folder_nor_hub_id(name: str) -> None:
    with refused("head"):
        head_folder(name)


def test_a_training_run_is_no_head(tmp_path: Path) -> None:
    with refused("head"):
        head_folder(tmp_path)
    below = make(tmp_path / "head")
    with refused("head") as error:
        head_folder(tmp_path)
    assert error.value.fix is not None and str(below) in error.value.fix


def test_heads_are_found_in_the_clone(installed: Path) -> None:
    with refused("head"):  # an installed wheel has none
        find_head(TARGET, method="p-eagle")
    folder = make(installed / "heads" / "smollm2-135m-p-eagle")
    found = find_head(TARGET, method="p-eagle")
    assert found is not None and found.folder == folder and found.k > 0
    with refused("head"):
        find_head(TARGET, method="eagle3")


def test_heads_are_found_in_their_package(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(installed / "some_heads" / "smollm2-135m-p-eagle")
    (folder.parent / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr("peagle.catalog.HEADS_PACKAGE", "some_heads")
    found = find_head(TARGET)
    assert found is not None and found.folder == folder
    assert found == find_head(TARGET, method="p-eagle")


def test_a_missing_catalog_head_says_how_to_get_it(installed: Path) -> None:
    fix = "pip install 'peagle[demo]'"
    with refused("head") as error:
        find_head(TARGET, method="p-eagle")
    assert error.value.fix == fix
    with pytest.warns(InputWarning, match="pip install"):
        assert find_head(TARGET) is None
    assert find_head(TARGET, method="none") is None


def test_a_folder_of_the_users_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = {"target": "owner/model", "heads": {"p-eagle": {"folder": "gone", "k": 3}}}
    catalog = tmp_path / "mine.yaml"
    catalog.write_text(yaml.safe_dump({"mine": mine}))
    monkeypatch.setenv("PEAGLE_CATALOG", str(catalog))
    with refused("head") as error:
        find_head("mine", method="p-eagle")
    assert error.value.fix is not None and str(tmp_path / "gone") in error.value.fix
