"""`peagle catalog`."""

from pathlib import Path

import pytest
import yaml
from runner import invoke, printed

from peagle.catalog import load_catalog

MINE = {"mine": {"target": "owner/model", "heads": {}, "gpu_memory": 2}}


def test_the_table_names_every_entry() -> None:
    shown = invoke("catalog").stdout
    for name in load_catalog():
        assert name in shown


def test_json_is_read_back_as_a_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json` prints the fields of catalog.yaml."""
    rows = printed("catalog")
    assert [row["name"] for row in rows] == list(load_catalog())
    for row in rows:
        assert printed("catalog", "show", row["name"]) == row
    given = {row.pop("name"): _given(row) for row in rows}
    packaged = load_catalog()
    file = tmp_path / "copy.yaml"
    file.write_text(yaml.safe_dump(given))
    monkeypatch.setattr("peagle.catalog.PACKAGED", file)
    assert load_catalog() == packaged


def _given(value: object) -> object:
    """Without what is null."""
    if isinstance(value, dict):
        return {key: _given(each) for key, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list) else value


def test_show_has_everything_but_what_is_unknown() -> None:
    """In the form of catalog.yaml."""
    [[name, shown]] = yaml.safe_load(invoke("catalog", "show", "gpt-oss-20b").stdout).items()
    head = shown["heads"]["p-eagle"]
    source = "published: vLLM blog, 2026-03-13"
    row = {"dataset": "HumanEval", "k": 7, "length": 3.94, "source": source}
    assert name == "gpt-oss-20b" and row in head["acceptance"] and head["below_vllm"] == "0.30.0"
    assert shown["profiles"]["benchmark"]["enable-prefix-caching"] is False
    assert shown["verified"] is False
    assert not {"folder", "others"} & head.keys() and None not in shown.values()


def test_entries_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(MINE))
    monkeypatch.setenv("PEAGLE_CATALOG", str(file))
    shown = invoke("catalog").stdout
    assert "owner/model" in shown and "none yet" in shown
    assert printed("catalog", "show", "mine")["gpu_memory"] == 2


def test_an_unknown_name(refused) -> None:
    line = refused("catalog", "show", "gpt-oss-12b")
    assert line == "peagle: name 'gpt-oss-12b': is not in the catalog; did you mean gpt-oss-120b?"
    line = refused("catalog", "show", "Qwen/Qwen3-8")
    assert line == "peagle: name 'Qwen/Qwen3-8': is not in the catalog; did you mean Qwen/Qwen3-8B?"
