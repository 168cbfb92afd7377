"""vLLM's flags and variables for a load and a head: the same on this machine and elsewhere."""

from collections.abc import Mapping
from typing import Any

from peagle.catalog import Entry
from peagle.catalog_fields import Scalar, VllmFlags

P_EAGLE_SINCE = "0.16.0"  # the oldest vLLM that drafts by a P-EAGLE head (pull request 32887)
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
V1_RUNNER = {RUNNER: "0"}
WHOLE_CACHES: VllmFlags = {"disable-hybrid-kv-cache-manager": True}
LOAD = 64  # requests at a time, where no number is given


def flag_options(flags: Mapping[str, Scalar | None]) -> list[str]:
    """Flags on a command line, of vLLM or `peagle serve`; None leaves one out."""
    options = list[str]()
    for flag, value in flags.items():
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            options += [f"--{flag}", str(value)]
    return options


def speculative_config(parallel: bool, model: str, k: int) -> dict[str, Any]:
    """vLLM's --speculative-config for a head in the folder or hub repository `model`, which drafts
    `k` tokens a round; `parallel`: all of them in one forward."""
    config = {"method": "eagle3", "model": model, "num_speculative_tokens": k}
    return config | {"parallel_drafting": True} if parallel else config


def usual_load(entry: Entry) -> int:
    """Requests at a time by the catalog, else by default."""
    return int(entry.vllm_flags.get("max-num-seqs", LOAD))


def graph_rows(memory: int | None) -> int:
    """Rows of a CUDA graph on a GPU of `memory` GiB, by vLLM's own limit: twice as many on the data
    center's Blackwell, the only GPUs with more than 150 GiB (vllm 0.32.0, config/vllm.py,
    _set_cudagraph_sizes)."""
    return 1024 if memory is not None and memory > 150 else 512


def k_for_load(k: int, load: int, memory: int | None) -> int:
    """Draft tokens per round, at most `k`: as many as a round of `load` requests verifies within
    the rows of a CUDA graph, one for each draft token and one for the token before.

    A rule of ours, not measured. Published: K = 7 was the best of 3, 5, 7 at 1 to 64 requests
    (GPT-OSS-20B on a B200, vLLM blog of 2026-03-13), as the rule has it; K = 3 at 8 requests
    (GPT-OSS-120B, an older head of two layers, vllm pull request 32887), and 3 to 64 and 1 to 128
    as vLLM's example for an EAGLE-3 head (dynamic_speculative_decoding.md at 015a47e), which are
    fewer.
    """
    return max(1, min(k, graph_rows(memory) // load - 1))


def load_flags(load: int, k: int | None, gpus: int, memory: int | None) -> VllmFlags:
    """Flags for a number of requests at a time, draft tokens per round and GPUs of `memory` GiB."""
    flags: dict[str, int] = {"max-num-seqs": load}
    if k is not None:
        # A round of P-EAGLE has up to 2·K rows a request in the head, and K + 1 in the target.
        # Not above twice vLLM's own limit: each graph takes memory, and time at the start.
        flags["max-cudagraph-capture-size"] = 2 * min(k * load, graph_rows(memory))
    if gpus > 1:
        flags["tensor-parallel-size"] = gpus
    return flags


def gpus_for(needed: int | None, memory: int | None) -> int:
    """Number of GPUs of `memory` GiB that hold `needed` GiB: a power of two, as they share the
    attention's heads; one where either is not known."""
    gpus = 1
    while memory and needed and gpus * memory < needed:
        gpus *= 2
    return gpus
