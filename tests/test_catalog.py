"""The catalog, the cache folder, and the error every layer shares."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused

from peagle.catalog import (
    PACKAGED,
    Acceptance,
    find_entry,
    find_name,
    known_entry,
    load_catalog,
    model_name,
)
from peagle.errors import InputError, first_line
from peagle.paths import cache_dir
from peagle.vllm.flags import speculative_config

MINE: Any = {"target": "owner/model", "heads": {"p-eagle": {"hub": "owner/head", "k": 5}}}
MEASURED = {"dataset": "HumanEval", "k": 5, "length": 2.5, "source": "measured: here"}


@pytest.fixture(autouse=True)
def no_file_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEAGLE_CATALOG", raising=False)


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a user's entries, which is not there yet."""
    file = tmp_path / "mine.yaml"
    monkeypatch.setenv("PEAGLE_CATALOG", str(file))
    return file


def write(file: Path, **entries: object) -> None:
    file.write_text(yaml.safe_dump(entries))


def measured(**other: object) -> dict[str, Any]:
    head = {"hub": "owner/head", "k": 5, "acceptance": [{**MEASURED, **other}]}
    return {**MINE, "heads": {"eagle3": head}}


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


def test_heads_have_a_source() -> None:
    for name, entry in load_catalog().items():
        for head in entry.heads.values():
            assert head.folder or head.source or head.acceptance, f"{name}: from where?"


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


def test_heads_for_long_contexts_have_entries_of_their_own() -> None:
    """The shorter one is found by the target's hub id."""
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        long, short = find_entry(f"{name}-long"), find_entry(name)
        assert long.target == short.target and find_name(str(long.target)) == name
        assert str(long.heads["p-eagle"].hub).endswith("-long-context")
        assert long.vllm_flags["max-model-len"] == 131072


def test_a_hub_id_finds_the_entry_of_its_target() -> None:
    known = find_entry("gpt-oss-20b")
    assert find_entry("openai/gpt-oss-20b") == known == known_entry("OpenAI/GPT-OSS-20B")
    assert find_name("openai/gpt-oss-20b") == "gpt-oss-20b"
    assert known_entry("openai/gpt-oss-2b") is None
    with refused("name") as error:
        find_entry("openai/gpt-oss-2b")
    assert error.value.fix == "did you mean openai/gpt-oss-20b?"
    with refused("name") as error:
        find_entry("qwen/qwen3-9b")
    assert error.value.fix == "did you mean Qwen/Qwen3-8B?", "in its own case"


def test_of_two_entries_for_one_hub_id_the_users_is_found(users: Path) -> None:
    write(users, mine={**MINE, "target": "openai/gpt-oss-20b"})
    assert find_name("openai/gpt-oss-20b") == "mine"
    assert find_name("gpt-oss-20b") == "gpt-oss-20b"


def test_the_speculative_config_of_vllm() -> None:
    one_by_one = {"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 3}
    assert speculative_config(False, "owner/head", 3) == one_by_one
    at_once = one_by_one | {"parallel_drafting": True}
    assert speculative_config(True, "owner/head", 3) == at_once


def test_the_catalog_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        load_catalog()["mine"] = find_entry("qwen3-8b")  # type: ignore[index]


def test_entries_of_the_users(users: Path, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    heads = {"eagle3": {"folder": "head", "k": 3, "acceptance": [MEASURED]}}
    mine = {**MINE, "gpu_memory": 2, "heads": heads}
    write(users, mine=mine, **{"qwen3-8b": MINE})
    entries = load_catalog()
    assert entries["mine"].gpu_memory == 2
    assert entries["mine"].heads["eagle3"].location == str(tmp_path / "head")
    [row] = entries["mine"].heads["eagle3"].acceptance
    assert row == Acceptance("HumanEval", 5, 2.5, "measured: here")
    assert entries["qwen3-8b"].target == "owner/model"  # theirs comes first
    assert "smollm2-135m" in entries


def with_head(**head: object) -> dict[str, Any]:
    return {**MINE, "heads": {"eagle3": head}}


@pytest.mark.parametrize(
    ("entry", "subject"),
    [
        ("text", "mine 'text'"),
        ({"heads": {}}, "mine.target"),
        ({**MINE, "vlm_flags": {}}, "mine.vlm_flags"),
        ({**MINE, "target": "model"}, "mine.target 'model'"),
        ({**MINE, "target": {"package": "a"}}, "mine.target.member"),
        ({**MINE, "target": 3}, "mine.target 3"),
        ({**MINE, "gpu_memory": 0}, "mine.gpu_memory 0"),
        ({**MINE, "gpu_memory": True}, "mine.gpu_memory True"),
        ({**MINE, "gpu_memory": 1.5}, "mine.gpu_memory 1.5"),
        ({**MINE, "min_vllm": 0.16}, "mine.min_vllm 0.16"),
        ({**MINE, "verified": "yes"}, "mine.verified 'yes'"),
        ({**MINE, "verified": 1}, "mine.verified 1"),
        ({**MINE, "note": " "}, "mine.note ' '"),
        ({**MINE, "vllm_flags": {"--tp": 1}}, "mine.vllm_flags '--tp'"),
        ({**MINE, "vllm_flags": {"tp": [1]}}, "mine.vllm_flags.tp [1]"),
        ({**MINE, "vllm_env": {"A": 1}}, "mine.vllm_env.A 1"),
        ({**MINE, "profiles": {"fast": 3}}, "mine.profiles.fast 3"),
        ({**MINE, "profiles": {"fast": {"--a": 3}}}, "mine.profiles.fast '--a'"),
        ({**MINE, "heads": {"medusa": {}}}, "mine.heads 'medusa'"),
        (with_head(folder=3, k=3), "mine.heads.eagle3.folder 3"),
        (with_head(k=3), "mine.heads.eagle3"),
        (with_head(hub="a/b"), "mine.heads.eagle3.k"),
        (with_head(hub="a/b", k=3, acceptance={}), "mine.heads.eagle3.acceptance {}"),
        (measured(length=True), "mine.heads.eagle3.acceptance[0].length True"),
        (measured(length=0.9), "mine.heads.eagle3.acceptance[0].length 0.9"),
        (measured(source="I"), "mine.heads.eagle3.acceptance[0].source 'I'"),
    ],
    ids=str,
)
def test_bad_entries(entry: object, subject: str, users: Path) -> None:
    write(users, mine=entry)
    with refused("catalog") as error:
        load_catalog()
    assert error.value.value == users and error.value.why.startswith(f"{subject}: ")


def test_unreadable_files(users: Path) -> None:
    with refused("catalog"):
        load_catalog()
    for text in ("a: [1", "a: 2024-13-45"):  # the latter is no date
        users.write_text(text)
        with refused("catalog"):
            load_catalog()


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("Qwen/Qwen2.5-0.5B@main", "Qwen/Qwen2.5-0.5B@main"),
        ("/models/qwen2.5-coder-0.5b-q4_k_m.gguf", "qwen2.5-coder-0.5b-q4_k_m"),
        ("models/a.gguf", "a"),
        ("~/a.gguf", "a"),
        ("~no-such-user/a.gguf", "a"),
        ("/gone/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("./gone/", "gone"),
        ("here/Qwen2.5", "Qwen2.5"),
        (".", "here"),
    ],
)
def test_names_of_models_as_people_see_them(
    target: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hub ids and names of the catalog stay, unless a folder has that name."""
    (tmp_path / "here" / "here" / "Qwen2.5").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert model_name(target) == shown


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for named, folder in ((str(tmp_path), tmp_path), ("~/kept", tmp_path / "me" / "kept")):
        monkeypatch.setenv("PEAGLE_HOME", named)
        assert cache_dir() == folder
    monkeypatch.delenv("PEAGLE_HOME")
    assert cache_dir() == tmp_path / "me" / ".cache" / "peagle"


def test_first_line_of_an_error() -> None:
    assert first_line(InputError("\n what is wrong\nand more")) == "what is wrong"
    assert first_line(KeyError()) == "KeyError"
