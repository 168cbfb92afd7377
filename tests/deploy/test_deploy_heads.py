"""The choice of a deployment's head, and heads elsewhere by their config.json."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from refusals import refused
from stand_ins import entry
from tiny import make_drafter, make_target
from transformers import LlamaConfig

from peagle.catalog import CatalogHead, Entry, find_entry
from peagle.deploy.heads import RemoteHead, choose
from peagle.deploy.plan import Choices, make_plan
from peagle.errors import InputError, InputWarning
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS
from peagle.vllm.flags import WHOLE_CACHES

PUBLIC = CatalogHead(k=3, hub="a/e", source="web")
BOTH = entry(heads={"p-eagle": CatalogHead(k=5, hub="a/p"), "eagle3": PUBLIC})
EAGLE3 = entry(heads={"eagle3": PUBLIC})
SIZES = {"hidden_size": 32, "vocab_size": 128, "num_hidden_layers": 4}  # of the heads' target
TARGET = LlamaConfig(**SIZES)
MIXED = LlamaConfig(layer_types=["sliding_attention", "full_attention"] * 2,
                    num_attention_heads=4, num_key_value_heads=2, **SIZES)  # fmt: skip


def chosen(of: Entry, head: str | None = None, method: str | None = None,
           place: str = "kubernetes", engine: str = "vllm") -> RemoteHead:  # fmt: skip
    """Without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        return choose("mine", of, RemoteHead(head, method), place=place, engine=engine)


def test_the_catalogs_head() -> None:
    parallel = RemoteHead("a/p", "p-eagle", 5, "0.16.0", v1=True)
    assert chosen(BOTH) == parallel
    assert chosen(BOTH, method="eagle3") == chosen(EAGLE3, "a/e") == RemoteHead("a/e", "eagle3", 3)
    newer = CatalogHead(k=5, hub="a/p", min_vllm="0.18.0")
    assert chosen(entry(heads={"p-eagle": newer})) == replace(parallel, min_vllm="0.18.0")


def test_a_public_eagle3_head_in_the_place_of_a_p_eagle_head_is_named() -> None:
    warning = r"mine has no p-eagle head: the public eagle3 head a/e drafts \(source: web\)"
    with pytest.warns(InputWarning, match=warning):
        choose("mine", EAGLE3, RemoteHead(), place="kubernetes", engine="native")
    assert chosen(EAGLE3, method="eagle3").name == "a/e"  # as asked
    unpublished = entry(heads={"eagle3": CatalogHead(k=3, hub="a/e")})
    assert chosen(unpublished).name == "a/e"


def test_no_head() -> None:
    with pytest.warns(InputWarning, match="mine has no head: nothing will draft; name one with"):
        found = choose("mine", entry(heads={}), RemoteHead(), place="sagemaker", engine="vllm")
    assert found == RemoteHead()
    with refused("method"):
        chosen(EAGLE3, method="p-eagle")


def test_a_head_of_the_catalog_is_known_by_its_hub_id() -> None:
    """With a fine-tune of its target, too: nothing says that this is none."""
    head = "amazon/GPT-OSS-20B-P-EAGLE"
    warning = f"head {head}: it is for openai/gpt-oss-20b, and may not fit owner/model"
    with pytest.warns(InputWarning, match=warning):
        found = choose("mine", entry(heads={}), RemoteHead(head), place="kubernetes", engine="vllm")
    assert found == chosen(find_entry("gpt-oss-20b"), head)
    assert (found.method, found.k, found.min_vllm) == ("p-eagle", 7, "0.18.0")


def test_what_other_machines_cannot_read(tmp_path: Path) -> None:
    for head, place in ((str(tmp_path), "sagemaker"), ("runs/a/head", "kubernetes"),
                        ("s3://a/b", "kubernetes")):  # fmt: skip
        with refused("head"):
            chosen(entry(), head, place=place)


def test_the_demo_targets_heads() -> None:
    """Its P-EAGLE head is found by the target's name, in an image too."""
    demo = find_entry("smollm2-135m")
    assert chosen(demo) == RemoteHead(method="p-eagle")
    with refused("head"):
        chosen(demo, method="eagle3")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the head me/head, of which only the named files can be fetched."""
    folder = tmp_path / "hub"

    fetched = tmp_path / "fetched"

    def fetch(hub_id: str, *, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        assert (hub_id, revision) == ("me/head", "v1")
        for name in allow_patterns:
            if (folder / name).is_file():
                (fetched / name).parent.mkdir(exist_ok=True)
                shutil.copy(folder / name, fetched / name)
        return str(fetched)

    monkeypatch.setattr("peagle.model.loader.snapshot_download", fetch)
    monkeypatch.setattr("peagle.vllm.head.target_config", lambda name: TARGET)
    return folder


def save(folder: Path, form: Any = "vllm", method: str = "p-eagle") -> None:
    save_drafter(make_drafter(make_target(), method), folder, form, dtype=None)


def test_a_head_elsewhere_by_its_configuration(hub: Path) -> None:
    save(hub)
    found = chosen(entry(), "me/head@v1")
    assert found == RemoteHead("me/head@v1", "p-eagle", 7, "0.16.0", v1=True)
    with refused("head"):
        chosen(entry(), "me/head@v1", "eagle3")
    save(hub.with_name("s"), "speculators")
    shutil.copy(hub.with_name("s") / "config.json", hub / "config.json")
    assert chosen(entry(), "me/head@v1").min_vllm == "0.22.0", "speculators' dialect is newer"


def test_vllm_keeps_whole_caches_where_it_would_split_the_heads(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(hub)
    monkeypatch.setattr("peagle.vllm.head.target_config", lambda name: MIXED)
    assert chosen(entry(), "me/head@v1").flags == WHOLE_CACHES
    for place in ("kubernetes", "sagemaker"):
        made = make_plan("mine", entry(gpu_memory=9), place, Choices(head="me/head@v1"))
        assert made.options["disable-hybrid-kv-cache-manager"] is True
        assert made.env == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 64}, "its target hidden size is 32, that of the target is 64"),
        ({"vocab_size": 256}, "its vocabulary is 128, that of the target is 256"),
        ({"num_hidden_layers": 2}, "it reads layer 3, the target has 0 to 1"),
    ],
)
def test_a_head_of_another_target(
    hub: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], said: str
) -> None:
    """By its sizes: vLLM would load everything first, and end, again and again."""
    save(hub)
    other = LlamaConfig(**SIZES | sizes)
    monkeypatch.setattr("peagle.vllm.head.target_config", lambda name: other)
    with refused("head") as error:
        chosen(entry(), "me/head@v1")
    assert (error.value.why, error.value.value) == (said, "me/head@v1")
    assert chosen(entry(), "me/head@v1", engine="native").name == "me/head@v1", "it looks itself"


def test_a_target_that_only_the_deployment_can_read(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are on S3, or it is gated: what cannot be compared is said."""

    def unreadable(name: str) -> LlamaConfig:
        raise InputError("is not on the hub, or is private", field="target", value=name)

    save(hub)
    monkeypatch.setattr("peagle.vllm.head.target_config", unreadable)
    said = r"head me/head@v1: its sizes .* are not compared .* \(is not on the hub, or is private\)"
    with pytest.warns(InputWarning, match=said):
        found = choose("mine", entry(), RemoteHead("me/head@v1"), place="sagemaker", engine="vllm")
    assert found == RemoteHead("me/head@v1", "p-eagle", 7, "0.16.0", v1=True)


def test_layer_ids_that_only_the_v1_runner_finds(hub: Path) -> None:
    """NVIDIA's heads have them in eagle_config alone; they draft one token after another."""
    save(hub, method="eagle3")
    config = json.loads((hub / "config.json").read_text())
    config["eagle_config"] = {LAYER_IDS: config.pop(LAYER_IDS)}
    (hub / "config.json").write_text(json.dumps(config))
    assert chosen(entry(), "me/head@v1").v1
    made = make_plan("mine", entry(gpu_memory=9), "sagemaker", Choices(head="me/head@v1"))
    assert made.env == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def test_our_own_form_is_for_our_engine(hub: Path) -> None:
    save(hub, "native")
    with refused("head") as error:
        chosen(entry(), "me/head@v1")
    assert "peagle export" in str(error.value.fix)
    assert chosen(entry(), "me/head@v1", engine="native").name == "me/head@v1"


@mock_aws
def test_a_head_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.vllm.head.target_config", lambda name: TARGET)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="mine")
    head = "s3://mine/heads/one/"
    with refused("head"):
        chosen(entry(), head, place="sagemaker")
    save(tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    client.upload_file(str(config), "mine", "heads/one/config.json")
    found = chosen(entry(), head, place="sagemaker")
    assert (found.name, found.method, found.k) == (head, "p-eagle", 7)
