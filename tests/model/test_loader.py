"""From a name to a target: folders, hub ids, names of the catalog, devices."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PLAIN, build
from gguf_files import not_loaded
from json_files import change_json
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedTokenizerFast

from peagle.catalog import Entry
from peagle.model.loader import described_target, load_target, locate, resolve_device, target_folder


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.model.loader.reached", lambda: True)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    build(LlamaConfig(**PLAIN | {"vocab_size": 128})).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_folder(folder: Path) -> None:
    target = load_target(str(folder))
    wanted = build(LlamaConfig(**PLAIN | {"vocab_size": 128})).state_dict()
    assert target.dtype == torch.float32 and target.name == str(folder)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert target.tokenizer is not None and target.tokenizer("cat")["input_ids"]


def test_dtype(folder: Path) -> None:
    assert load_target(str(folder), dtype="bfloat16").embedding.dtype == torch.bfloat16
    with refused("dtype"):
        load_target(str(folder), dtype="int3")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("owner/name", ("owner/name", None)),
        ("owner/name@v1.2", ("owner/name", "v1.2")),
        ("owner/name@", ("owner/name", None)),
        ("owner/name@refs/pr/3", ("owner/name", "refs/pr/3")),
    ],
)
def test_revision_of_a_hub_id(reachable: None, name: str, found: tuple[str, str | None]) -> None:
    assert locate(name) == found


WAYS = "give a folder, a .gguf file, a hub id"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        *(
            (name, f"^{WAYS}.*catalog name.*smollm2")
            for name in ("llama", "a/b/c", "./x", "~no-such-user/x")
        ),
        *((name, f"^{WAYS}") for name in ("qwen2.5-codr", "mine", "gemma-3-270m")),
        ("smolm2-135", rf"^did you mean smollm2-135m\? Or {WAYS}"),
    ],
)
def test_unknown_names(name: str, fix: str) -> None:
    with refused("target") as error:
        locate(name)
    assert error.value.why == "unknown model" and re.search(fix, str(error.value.fix))


@pytest.fixture
def hub(folder: Path, tmp_path: Path, reachable: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub that has owner/name@v1, in files of 10 kB and one that nothing names."""
    load_target(str(folder)).model.save_pretrained(folder, max_shard_size="10kB")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    cached = tmp_path / "hub"
    cached.mkdir()

    def download(hub_id: str, *, revision: str, allow_patterns: list[str], **_: Any) -> str:
        assert (hub_id, revision) == ("owner/name", "v1")
        for file in {each for pattern in allow_patterns for each in folder.glob(pattern)}:
            shutil.copy(file, cached)
        return str(cached)

    monkeypatch.setattr("peagle.model.loader.snapshot_download", download)
    return cached


def test_a_target_on_the_hub(hub: Path, folder: Path) -> None:
    """Its weights are those that the index names, and only the wanted ones are downloaded."""
    assert target_folder("owner/name@v1", ()) == hub
    assert (hub / "tokenizer.json").is_file() and not list(hub.glob("*.safetensors"))
    target_folder("owner/name@v1", ("model.norm.", "lm_head."))
    assert 1 <= len(list(hub.glob("*.safetensors"))) <= 2
    target = described_target("owner/name@v1")
    assert target is not None and target.tokenizer is not None
    assert torch.equal(target.embedding, load_target(str(folder)).embedding)
    assert not (hub / "consolidated.safetensors").exists()


def test_a_tokenizer_of_another_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's own class is not made from a tokenizer.json."""

    class MistralCommonBackend:
        pass

    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **__: MistralCommonBackend()
    )
    not_loaded(folder, "its MistralCommonBackend has no tokenizer.json")


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


NORM = "model.norm.weight"
UNUSABLE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), "the folder has no config.json"),
    (lambda f: (f / "config.json").write_text('{"model_type": "perceptron9"}'), "perceptron9"),
    (lambda f: change_tensors(f, lambda t: t.pop(NORM)), f"missing tensor '{NORM}'"),
    (
        lambda f: change_tensors(f, lambda t: t.update({NORM: torch.zeros(3)})),
        rf"tensor {NORM} has shape \[3\], expected \[32\]",
    ),
    (lambda f: (f / "model.safetensors").write_bytes(b"not a tensor"), "header"),
    (pickled, "safetensors"),
    (
        lambda f: change_json(f / "config.json", quantization_config={"quant_method": "awq"}),
        "requires gptqmodel",
    ),
]


@pytest.mark.parametrize(("damage", "why"), UNUSABLE, ids=[why for _, why in UNUSABLE])
def test_unusable_folders(damage: Callable[[Path], object], why: str, folder: Path) -> None:
    """Transformers would only warn of a missing tensor, and draw the weights at random."""
    damage(folder)
    not_loaded(folder, why)


@pytest.mark.parametrize(("kind", "told"), [(RuntimeError, True), (RecursionError, False)])
def test_a_quantiser_without_a_gpu(
    kind: type[Exception], told: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a more special type is none of the files'."""

    def refuse(*_: Any, **__: Any) -> None:
        raise kind("GPU is required to quantize or run quantize model.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    if told:
        not_loaded(folder, "GPU is required to quantize or run quantize model$")
    else:
        with pytest.raises(kind):
            load_target(str(folder))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device(folder: Path) -> None:
    with refused("device"):
        load_target(str(folder), device="cuda")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (resolve_device("auto"), resolve_device("cpu")) == ("cpu", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ("auto", "cpu", "cuda", "cuda:1")
    assert [resolve_device(name) for name in names] == ["cuda", "cpu", "cuda", "cuda:1"]
    for wrong in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:2", "meta", ""):
        with refused("device"):
            resolve_device(wrong)


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen3-8B", "qwen/qwen3-8b"])
def test_a_catalog_name_stands_for_a_hub_id(name: str, reachable: None) -> None:
    assert locate(name) == ("Qwen/Qwen3-8B", None)


def test_a_folder_comes_before_a_catalog_name_in_another_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert locate("Qwen3-8B") == ("Qwen3-8B", None)


def test_a_catalog_name_may_have_a_revision(
    reachable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry("owner/name@v1", heads={})
    monkeypatch.setattr("peagle.catalog.load_catalog", lambda: {"mine": entry})
    assert locate("mine") == ("owner/name", "v1")
