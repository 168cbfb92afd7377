"""Needs of a head in vLLM by its config.json alone: on the hub, in S3, and by its keys."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from moto import mock_aws
from refusals import refused
from tiny_heads import head_config, make_head, tiny_target

from peagle.heads.format import HeadKeys
from peagle.heads.save import save_drafter
from peagle.methods.keys import AUX_COUNT, LAYER_IDS
from peagle.vllm.flags import RUNNER
from peagle.vllm.head import check_for_vllm, needs_of, unreadable

BUCKET = "heads"
HUB = "me/head@v2"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield client


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    config = head_config(embedding="mask-row", depths=5)
    save_drafter(make_head(config, target=tiny_target()), tmp_path / "head", "vllm")
    (tmp_path / "head" / "correction").mkdir()
    sizes = json.dumps({"rank": 4, "candidates": 8})
    (tmp_path / "head" / "correction" / "config.json").write_text(sizes)
    return tmp_path / "head"


def on_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A hub that has one head; the requests to it."""
    asked = list[Any]()

    def download(hub_id: str, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        asked.append((hub_id, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("peagle.model.loader.snapshot_download", download)
    return asked


def put(bucket: Any, folder: Path, prefix: str) -> None:
    for file in folder.rglob("*.json"):
        key = f"{prefix}/{file.relative_to(folder)}"
        bucket.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())


@pytest.mark.parametrize("location", [HUB, f"s3://{BUCKET}/my/head", f"s3://{BUCKET}/my/head/"])
def test_only_configs_are_read(
    location: str, exported: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for weights in exported.glob("*.safetensors"):
        weights.unlink()
    put(bucket, exported, "my/head")
    asked = on_hub(exported, monkeypatch)
    needs = check_for_vllm(location)
    assert (needs.method, needs.k) == ("p-eagle", 5)
    assert needs.since.version == "0.16.0" and needs.environ == {RUNNER: "0"}
    assert needs.lost == "its correction" and needs.drafter.num_hidden_layers == 3
    if location == HUB:
        assert asked == [("me/head", "v2", ["config.json", "correction/config.json"])]


def test_the_native_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_drafter(make_head(head_config(embedding="mask-row")), tmp_path / "head")
    on_hub(tmp_path / "head", monkeypatch)
    with refused("head") as error:
        check_for_vllm(HUB)
    assert error.value.value == HUB
    assert error.value.fix is not None and "peagle export" in error.value.fix


@pytest.mark.parametrize("location", ["head", "./head", "/tmp/head", "https://a/b", "s3:/a/b"])
def test_neither_hub_nor_s3(location: str) -> None:
    with refused("head"):
        check_for_vllm(location)


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr("peagle.model.loader.snapshot_download", offline)
    monkeypatch.setattr("peagle.model.loader.reached", lambda: True)
    with refused("head"):
        check_for_vllm(HUB)


@pytest.mark.parametrize("place", ["heads/none", "heads/damaged", "no-such-bucket/head", "heads"])
def test_no_head_in_s3(place: str, bucket: Any) -> None:
    bucket.put_object(Bucket=BUCKET, Key="damaged/config.json", Body=b"{")
    with refused("head") as error:
        check_for_vllm(f"s3://{place}")
    assert error.value.value == f"s3://{place}"


@pytest.mark.parametrize("denied", ["config.json", "correction/config.json"])
def test_files_that_may_not_be_read(
    denied: str, exported: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 denies a file that is not there to readers who may not list the bucket."""
    put(bucket, exported, "head")
    get = bucket.get_object

    def guarded(Bucket: str, Key: str) -> Any:
        if Key == f"head/{denied}":
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetObject")
        return get(Bucket=Bucket, Key=Key)

    monkeypatch.setattr(bucket, "get_object", guarded)
    monkeypatch.setattr("boto3.client", lambda _: bucket)
    if denied == "config.json":
        with refused("head"):
            check_for_vllm(f"s3://{BUCKET}/head")
    else:
        assert check_for_vllm(f"s3://{BUCKET}/head").lost is None


def test_s3_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_object(**_: str) -> Any:
        raise NoCredentialsError

    monkeypatch.setattr("boto3.client", lambda _: SimpleNamespace(get_object=get_object))
    with refused("head"):
        check_for_vllm(f"s3://{BUCKET}/head")


SIZES = {"model_type": "llama", "hidden_size": 8, "vocab_size": 9, "num_attention_heads": 2}
QWEN3 = SIZES | {"model_type": "qwen3"}
PTD = {"ptd_token_id": 3}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 9}


def theirs(kind: str, sizes: dict[str, Any] = SIZES, **keys: Any) -> dict[str, Any]:
    return {"speculators_model_type": kind, "transformer_layer_config": sizes, **keys}


@pytest.mark.parametrize(
    ("raw", "version"),
    [
        (SIZES, "0.10.2"),
        (theirs("eagle3"), "0.10.2"),
        (SIZES | PTD, "0.16.0"),
        (SIZES | WINDOW, "0.16.0"),
        (QWEN3, "0.24.0"),
        (QWEN3 | WINDOW, "0.26.0"),
        (SIZES | {"norm_before_fc": True}, "0.18.0"),
        (theirs("eagle3", norm_before_fc=True), "0.19.0"),
        (SIZES | {"fc_norm": True}, "0.22.0"),
        (SIZES | PTD | {"norm_output": True}, "0.16.0"),
        (theirs("peagle", mask_token_id=3), "0.22.0"),
        (theirs("peagle", QWEN3, mask_token_id=3), "0.24.0"),
        (theirs("eagle3", QWEN3), "0.24.0"),
        (theirs("eagle3", norm_output=True), "0.25.0"),
        (SIZES | {"mask_token_id": 3}, "0.28.0"),
    ],
    ids=str,
)
def test_the_first_release_that_runs_it(raw: dict[str, Any], version: str) -> None:
    assert needs_of(HeadKeys("head", raw)).since.version == version


@pytest.mark.parametrize(
    ("version", "runs"), [("0.15.1", False), ("0.16.0", True), ("0.29.1", True), ("0.30.0", False)]
)
def test_a_release_that_does_not_run_it(version: str, runs: bool) -> None:
    """vLLM from 0.30 on has no place for the d2t of a head that drafts all tokens."""
    raw = SIZES | PTD | {"draft_vocab_size": SIZES["vocab_size"]}
    assert (needs_of(HeadKeys("head", raw)).refusal(version) is None) == runs
    ours = raw | {"peagle": {"method": "p-eagle", "d2t": False}}
    assert needs_of(HeadKeys("head", ours)).below is None


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_an_activation_that_vllm_lacks(activation: str) -> None:
    """The second is not known here either."""
    sizes = SIZES | {"hidden_act": activation}
    for raw in (sizes, theirs("eagle3", sizes)):
        with refused("head") as error:
            needs_of(HeadKeys("head", raw))
        assert error.value.why.startswith(f"its activation is {activation}, ")


FIVE = {LAYER_IDS: [1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("raw", "readable"),
    [
        (SIZES, True),
        (SIZES | FIVE, False),  # vLLM counts the nested ones
        (SIZES | FIVE | {"eagle_config": FIVE}, True),
        (theirs("peagle", **PTD, **FIVE), False),
        (theirs("peagle", SIZES | {AUX_COUNT: 5}, **PTD, **FIVE), True),
        (QWEN3 | FIVE, True),  # the ids at the top, too
        (QWEN3 | FIVE | {AUX_COUNT: 3}, False),
        (theirs("eagle3", QWEN3, **FIVE), True),
    ],
)
def test_the_number_of_feature_layers(raw: dict[str, Any], readable: bool) -> None:
    """vLLM sizes `fc` by it: any other number ends it on load."""
    assert (unreadable(HeadKeys("head", raw)) is None) == readable
