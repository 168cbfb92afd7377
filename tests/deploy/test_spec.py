"""Deployments of catalog entries: engine, head, flags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused
from stand_ins import entry

from peagle.catalog import CatalogHead, Entry, find_entry, load_catalog
from peagle.deploy.drafting import Drafting
from peagle.deploy.spec import make_spec, resource_name, with_profile
from peagle.errors import InputWarning


def options(command: list[str]) -> dict[str, str]:
    """Option → value of a command line; a bare one has none."""
    found, names = {}, [at for at, word in enumerate(command) if word.startswith("--")]
    for at in names:
        value = command[at + 1] if at + 1 < len(command) else "--"
        found[command[at]] = "" if value.startswith("--") else value
    return found


def test_vllm_gets_the_flags_of_the_catalog_and_the_head() -> None:
    command = make_spec("gpt-oss-20b", find_entry("gpt-oss-20b"), None, remote=True).command(
        "::", 1
    )
    assert command[:3] == ["vllm", "serve", "openai/gpt-oss-20b"]
    given = options(command)
    assert json.loads(given["--speculative-config"]) == {
        "method": "eagle3",
        "model": "amazon/GPT-OSS-20B-P-EAGLE",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    assert given["--kv-cache-dtype"] == "fp8" and given["--max-model-len"] == "32768"
    assert given["--async-scheduling"] == ""
    assert given["--served-model-name"] == "gpt-oss-20b"
    assert "--tensor-parallel-size" not in given


def test_eagle3_heads_draft_one_after_another() -> None:
    heads = {"eagle3": CatalogHead(k=3, hub="owner/head")}
    spec = make_spec("mine", entry(heads=heads, gpus=4), "vllm", remote=True)
    assert spec.speculative is not None and "parallel_drafting" not in spec.speculative
    assert options(spec.command("::", 1))["--tensor-parallel-size"] == "4"


BENCHMARK = ("stream-interval", "enable-prefix-caching")


@pytest.mark.parametrize("name", load_catalog())
def test_flags_of_a_benchmark_are_no_default(name: str) -> None:
    assert not set(BENCHMARK) & set(find_entry(name).vllm_flags)


def test_a_profile_adds_its_flags() -> None:
    plain = find_entry("gpt-oss-20b")
    given = with_profile("gpt-oss-20b", plain, "benchmark").vllm_flags
    assert given == {**plain.vllm_flags, "stream-interval": 20, "enable-prefix-caching": False}
    assert with_profile("gpt-oss-20b", plain, None) == plain
    mine = entry(vllm_flags={"a": 1, "b": 2}, profiles={"fast": {"b": 3}})
    assert with_profile("mine", mine, "fast").vllm_flags == {"a": 1, "b": 3}  # the profile wins


@pytest.mark.parametrize(
    ("name", "fix"), [("gpt-oss-20b", "choose benchmark"), ("qwen3-8b", "it has none")]
)
def test_an_unknown_profile(name: str, fix: str) -> None:
    with refused("profile") as error:
        with_profile(name, find_entry(name), "fast")
    assert error.value.fix == fix


def test_without_a_head_nothing_is_drafted() -> None:
    with pytest.warns(InputWarning, match="mine has no head: nothing will draft"):
        spec = make_spec("mine", entry(heads={}), None, remote=True)
    assert spec.speculative is None and "--speculative-config" not in spec.command("::", 1)


def test_k_is_the_users() -> None:
    for engine in ("native", "vllm"):
        spec = make_spec("mine", entry(), engine, remote=True, drafting=Drafting(k=2))
        given = options(spec.command("::", 1))
        if engine == "native":
            assert given["--k"] == "2"
        else:
            assert json.loads(given["--speculative-config"])["num_speculative_tokens"] == 2
    assert "--k" not in options(make_spec("mine", entry(), "native", remote=True).command("::", 1))


def test_revisions_are_options_of_vllm() -> None:
    asked = Drafting("owner/head@v2", "eagle3", 3)
    pinned = entry(target="owner/model@v1")
    spec = make_spec("mine", pinned, "vllm", remote=True, drafting=asked)
    given = options(spec.command("::", 1))
    assert spec.command("::", 1)[2] == "owner/model" and given["--revision"] == "v1"
    assert json.loads(given["--speculative-config"]) == {
        "method": "eagle3", "model": "owner/head", "revision": "v2", "num_speculative_tokens": 3
    }  # fmt: skip
    ours = make_spec("mine", pinned, "native", remote=True, drafting=asked).command("::", 1)
    assert ours[2:5] == ["owner/model@v1", "--head", "owner/head@v2"]


def test_the_demo_target_is_served_by_our_engine_which_knows_its_head() -> None:
    for remote in (False, True):
        spec = make_spec("smollm2-135m", find_entry("smollm2-135m"), None, remote=remote)
        assert (spec.engine, spec.gpus, spec.key_variable) == ("native", 0, "PEAGLE_API_KEY")
        assert spec.command("::", 1)[:4] == ["peagle", "serve", "smollm2-135m", "--host"]
        assert spec.command("::", 1)[-2:] == ["--engine", "native"]  # on a machine with vLLM, too


def test_our_engine_is_told_the_head() -> None:
    given = options(make_spec("mine", entry(), None, remote=False).command("::", 1))
    assert given["--head"] == "owner/head" and given["--device"] == "cuda"


@pytest.mark.parametrize(
    ("target", "engine", "fix"),
    [
        (find_entry("qwen3-8b"), "vlm", "choose native or vllm"),
        (find_entry("smollm2-135m"), "vllm", "choose native"),
        (entry(gpus=2), "native", "choose vllm"),
    ],
)
def test_an_engine_that_cannot_serve_it(target: Entry, engine: str, fix: str) -> None:
    with refused("engine") as error:
        make_spec("mine", target, engine, remote=True)
    assert error.value.fix == fix


def test_a_head_in_a_folder_goes_nowhere_else(tmp_path: Path) -> None:
    mine = entry(heads={"p-eagle": CatalogHead(k=3, folder=tmp_path / "head")})
    with refused("head"):
        make_spec("mine", mine, None, remote=True)
    with refused("head"):
        make_spec("mine", mine, None, remote=False)
    (tmp_path / "head").mkdir()
    spec = make_spec("mine", mine, "vllm", remote=False)
    assert spec.speculative is not None and spec.speculative["model"] == str(tmp_path / "head")


def test_resources_have_names_that_dns_takes() -> None:
    assert resource_name("Qwen3.5_Coder") == "peagle-qwen3-5-coder"
    assert resource_name("openai/gpt-oss-20b") == "peagle-openai-gpt-oss-20b"
    assert len(resource_name("x" * 80)) == 47
    long = "owner/a-name-that-is-very-long-and-of-version-"
    assert resource_name(f"{long}1") != resource_name(f"{long}2")
    assert len({resource_name(name) for name in load_catalog()}) == len(load_catalog())


def test_torch_is_not_imported() -> None:
    code = "import sys, peagle.cli.deploy; assert not {'torch', 'boto3'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
