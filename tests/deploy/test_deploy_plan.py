"""The one source of a deployment: command line, variables, image and hardware."""

import json
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from stand_ins import entry

from peagle.catalog import CatalogHead, Entry, find_entry, load_catalog
from peagle.deploy.data import facts
from peagle.deploy.plan import Choices, Plan, make_plan, resource_name
from peagle.errors import InputWarning
from peagle.vllm.flags import graph_rows
from peagle.vllm.process import numbers

REMOTE = ("kubernetes", "sagemaker")
SERVED = {name: each for name, each in load_catalog().items() if isinstance(each.target, str)}


def plan(name: str = "gpt-oss-20b", place: str = "kubernetes", **choices: Any) -> Plan:
    return make_plan(name, find_entry(name), place, Choices(**choices))


def mine(of: Entry, place: str = "kubernetes", **choices: Any) -> Plan:
    return make_plan("mine", of, place, Choices(**choices))


def speculative(made: Plan) -> dict[str, Any]:
    return dict(json.loads(str(made.options["speculative-config"])))


def test_a_whole_plan() -> None:
    made = plan()
    assert (made.engine, made.argv[0]) == ("vllm", "openai/gpt-oss-20b")
    assert speculative(made) == {
        "method": "eagle3", "model": "amazon/GPT-OSS-20B-P-EAGLE",
        "num_speculative_tokens": 7, "parallel_drafting": True,
    }  # fmt: skip
    assert (made.k, made.gpus, made.gpu, made.key_variable) == (7, 1, "h100", "VLLM_API_KEY")
    assert (made.cuda, made.ami, made.instance_type) == ("13.0", None, None)
    assert made.env == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert made.options["served-model-name"] == "gpt-oss-20b"
    assert "--tensor-parallel-size" not in made.argv and "--async-scheduling" in made.argv


@pytest.mark.parametrize(("load", "k", "rows"), [(1, 7, 14), (64, 7, 896), (128, 3, 768)])
def test_more_load_means_fewer_draft_tokens(load: int, k: int, rows: int) -> None:
    made = plan(load=load)
    assert (made.k, made.options["max-num-seqs"]) == (k, load)
    assert made.options["max-cudagraph-capture-size"] == rows == 2 * k * load
    assert plan(load=load, k=9).k == 9, "the user's counts"
    assert plan(load=1000).options["max-cudagraph-capture-size"] == 1024


def test_a_data_center_gpu_verifies_more() -> None:
    """Graphs are twice as large on GPUs of compute capability 10, by vLLM's own limit."""
    assert plan(load=128, gpu="b200").k == 7
    for gpu in facts().gpus.values():
        rows = 1024 if gpu.capability.startswith("10.") else 512
        assert graph_rows(gpu.memory) == rows


def everywhere() -> Iterator[tuple[Entry, Plan]]:
    """All entries at all places, on all GPUs."""
    for (name, known), place, gpu in product(SERVED.items(), REMOTE, facts().gpus):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InputWarning)
            yield known, make_plan(name, known, place, Choices(gpu=gpu))


def test_every_entry_fits_its_gpus() -> None:
    for known, made in everywhere():
        hardware = facts().gpus[str(made.gpu)]
        assert known.gpu_memory and made.gpus * hardware.memory >= known.gpu_memory
        assert made.options.get("tensor-parallel-size", 1) == made.gpus
        assert "kv-cache-dtype" not in made.options, "fp8 changes the target's answers"
        rows = made.options["max-cudagraph-capture-size"]
        largest = 2 * graph_rows(hardware.memory)
        assert rows <= largest and rows <= 2 * made.k * made.options["max-num-seqs"]
        assert made.options["enable-auto-tool-choice"] and made.options["tool-call-parser"]
        if made.instance_type is not None:
            assert hardware.instances[made.instance_type] >= made.gpus
            driver = {"12": "3-1", "13": "4-1"}[str(made.cuda)[:2]]
            assert str(made.ami).endswith(driver)


def test_fp8_caches_are_asked_for_and_only_where_they_are_right() -> None:
    assert plan(gpu="b200", profile="b200").options["kv-cache-dtype"] == "fp8"
    with refused("profile"):
        plan(gpu="h100", profile="b200")


@pytest.mark.parametrize(
    ("image", "cuda", "ami"),
    [
        (None, "13.0", "4-1"),
        ("1.dkr.ecr.us-east-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.1", "13.0", "4-1"),
        ("1.dkr.ecr.us-east-1.amazonaws.com/vllm/vllm-openai:v0.29.0", "13.0", "4-1"),  # a mirror
        ("vllm:server-sagemaker-cuda-v1", "12.9", "3-1"),
        ("me/vllm:0.24.0-gpu-py312-cu129-ubuntu22.04-sagemaker", "12.9", "3-1"),
    ],
)
def test_the_ami_has_the_drivers_of_the_image(image: str | None, cuda: str, ami: str) -> None:
    made = plan(place="sagemaker", gpu="h100", image=image)
    assert made.cuda == cuda and str(made.ami).endswith(ami)
    on_blackwell = plan(place="sagemaker", gpu="rtx-pro-6000", image=image)
    assert str(on_blackwell.ami).endswith("4-1")


def test_an_image_older_than_the_head_needs() -> None:
    with refused("image") as error:
        plan("qwen3-8b", "sagemaker", image="x/vllm:server-sagemaker-cuda-v1")
    assert error.value.fix == "choose vllm:server-sagemaker-cuda-v2.0", "the nearest that can"
    with refused("image"):
        plan(image="vllm/vllm-openai:v0.17.0")
    with refused("image"):
        plan("gemma-4-31b", image="vllm/vllm-openai:v0.19.0")  # the target
    heads = {"eagle3": CatalogHead(k=3, hub="owner/head", min_vllm="0.99.0")}
    with refused("image") as error:
        mine(entry(heads=heads))
    assert "0.99.0" in error.value.why, "no known image can"


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("mine/vllm:latest", "names no version"),
        ("vllm/vllm-openai:v0.33.0", "tried up to vLLM 0.32.0"),
    ],
)
def test_images_that_may_not_draft(image: str, said: str) -> None:
    with pytest.warns(InputWarning, match=said):
        plan("qwen3-8b", image=image)


def test_an_image_newer_than_the_head_can() -> None:
    """The head stores d2t and drafts all tokens, which vLLM 0.30 does not load."""
    assert plan().image == "vllm/vllm-openai:v0.29.0"
    assert plan(place="sagemaker").image.endswith("-v2.4"), "0.27.1"
    with refused("image") as error:
        plan(image="vllm/vllm-openai:v0.32.0")
    assert "vllm/vllm-openai:v0.29.0" in str(error.value.fix)


def test_an_image_without_a_tag() -> None:
    for image in ("vllm/vllm-openai", "registry:5000/vllm"):
        with refused("image"):
            plan(image=image)


def test_default_images_can_all() -> None:
    for known in SERVED.values():
        for each in known.heads.values():
            for image in facts().images:
                assert numbers(each.min_vllm) <= numbers(image.vllm) or image.name.endswith("v1")


def test_images_are_the_newest_first() -> None:
    for place in REMOTE:
        found = [numbers(each.vllm) for each in facts().images if each.place == place]
        assert found == sorted(found, reverse=True)


def test_instance_types() -> None:
    assert plan(place="sagemaker").instance_type == "ml.g7e.2xlarge"
    made = plan("gemma-4-31b", "sagemaker", instance_type="ml.g6e.12xlarge", method="eagle3")
    assert (made.gpu, made.gpus) == ("l40s", 4)
    for kind, gpu, fix in (
        ("ml.p5.4xlarg", None, "did you mean ml.p5.4xlarge?"),
        ("ml.p5.4xlarge", "l4", "did you mean ml.g6.4xlarge?"),
    ):
        with refused("instance_type") as error:
            plan(place="sagemaker", instance_type=kind, gpu=gpu)
        assert error.value.fix == fix
    with pytest.warns(InputWarning, match="uses 1 of its 8 GPUs"):
        plan(place="sagemaker", gpu="h200")
    with refused("instance_type") as error:
        plan("gemma-4-31b", "sagemaker", instance_type="ml.p5.4xlarge", method="eagle3")
    assert error.value.fix == "choose ml.p5.48xlarge"


def test_gemma_fits_two_gpus_and_speaks_its_own_formats() -> None:
    """As vLLM's recipe has it; at its full context one GPU does not hold it."""
    options = plan("gemma-4-31b", gpu="h100", method="eagle3").options
    assert (options["tensor-parallel-size"], options["max-model-len"]) == (2, 32768)
    assert options["tool-call-parser"] == options["reasoning-parser"] == "gemma4"


def test_an_unknown_size_is_said() -> None:
    with pytest.warns(InputWarning, match="mine takes one h100: .* how much memory"):
        assert mine(entry()).gpus == 1


def test_gpus_that_are_unknown_or_too_small() -> None:
    for name in ("h1000", "a10g"):
        with refused("gpu"):
            mine(entry(gpu_memory=600), gpu=name)


def test_eagle3_heads_draft_one_after_another() -> None:
    heads = {"eagle3": CatalogHead(k=3, hub="owner/head")}
    made = mine(entry(heads=heads, gpu_memory=300))
    assert "parallel_drafting" not in speculative(made) and made.env == {}
    assert made.options["tensor-parallel-size"] == 4


BENCHMARK = ("stream-interval", "enable-prefix-caching")


def test_flags_of_a_benchmark_are_no_default() -> None:
    for known in SERVED.values():
        assert not set(BENCHMARK) & set(known.vllm_flags)


def test_a_profile_adds_its_flags() -> None:
    plain, profiled = plan().options, plan(profile="benchmark").options
    assert dict(profiled) == {**plain, "stream-interval": 20, "enable-prefix-caching": False}
    fast = entry(vllm_flags={"a": 1, "b": 2}, profiles={"fast": {"b": 3}})
    assert mine(fast, profile="fast").options["b"] == 3  # the profile wins


@pytest.mark.parametrize(
    ("name", "fix"), [("gpt-oss-20b", "choose benchmark, b200"), ("qwen3-8b", "it has none")]
)
def test_an_unknown_profile(name: str, fix: str) -> None:
    with refused("profile") as error:
        plan(name, profile="fast")
    assert error.value.fix == fix


def test_without_a_head_nothing_is_drafted() -> None:
    with pytest.warns(InputWarning, match="mine has no head: nothing will draft"):
        made = mine(entry(heads={}))
    assert made.head is made.k is None and "--speculative-config" not in made.argv
    with pytest.warns(InputWarning), refused("k"):
        mine(entry(heads={}), k=3)


def test_revisions_are_options_of_vllm() -> None:
    heads = {"eagle3": CatalogHead(k=3, hub="owner/head@v2")}
    made = mine(entry(target="owner/model@v1", heads=heads))
    assert (made.model, made.revision, made.options["revision"]) == ("owner/model", "v1", "v1")
    assert speculative(made) == {
        "method": "eagle3", "model": "owner/head", "revision": "v2", "num_speculative_tokens": 3
    }  # fmt: skip
    ours = mine(entry(target="owner/model@v1", heads=heads), engine="native", image="me:1")
    assert ours.argv[:3] == ("owner/model@v1", "--head", "owner/head@v2")


def test_our_engine() -> None:
    packaged = plan("smollm2-135m", image="me:1")
    assert (packaged.engine, packaged.gpus, packaged.gpu) == ("native", 0, None)
    assert packaged.key_variable == "PEAGLE_API_KEY"
    assert packaged.argv[0] == "smollm2-135m" and packaged.argv[-2:] == ("--engine", "native")
    made = mine(entry(), engine="native", image="me:1")
    assert (made.k, made.options["device"], made.options["head"]) == (None, "cuda", "owner/head")
    assert mine(entry(), engine="native", image="me:1", load=5).options["max-batch"] == 5
    with refused("image"):
        mine(entry(), engine="native")
    with refused("gpu"):
        plan("smollm2-135m", image="me:1", gpu="h100")
    with refused("profile"):
        mine(entry(), engine="native", image="me:1", profile="benchmark")


@pytest.mark.parametrize(
    ("target", "engine", "fix"),
    [
        (find_entry("smollm2-135m"), "vllm", "choose native"),
        (entry(gpu_memory=100), "native", "choose vllm"),
    ],
)
def test_an_engine_that_cannot_serve_it(target: Entry, engine: str, fix: str) -> None:
    with refused("engine") as error:
        mine(target, engine=engine)
    assert error.value.fix == fix


@pytest.mark.parametrize("field", ["load", "k", "replicas", "max_replicas"])
def test_numbers_begin_at_one(field: str) -> None:
    with refused(field):
        plan(**{field: 0})
    with refused("max_replicas"):
        plan(replicas=3, max_replicas=2)


def test_a_head_in_a_folder_goes_nowhere_else(tmp_path: Path) -> None:
    with refused("head"):
        mine(entry(heads={"p-eagle": CatalogHead(k=3, folder=tmp_path)}))


def test_resources_have_names_that_dns_takes() -> None:
    assert resource_name("Qwen3.5_Coder") == "peagle-qwen3-5-coder"
    assert resource_name("openai/gpt-oss-20b") == "peagle-openai-gpt-oss-20b"
    assert len(resource_name("x" * 80)) == 41
    long = "owner/a-name-that-is-very-long-and-of-version-"
    assert resource_name(f"{long}1") != resource_name(f"{long}2")
    assert len({resource_name(name) for name in load_catalog()}) == len(load_catalog())
