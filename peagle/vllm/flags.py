"""vLLM's flags and variables for a load and a head: the same on this machine and elsewhere."""

from peagle.catalog_fields import VllmFlags

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
V1_RUNNER = {RUNNER: "0"}
WHOLE_CACHES: VllmFlags = {"disable-hybrid-kv-cache-manager": True}
LOAD = 64  # requests at a time, where no number is given
GRAPH_ROWS = 512  # rows of a CUDA graph, by vLLM's own limit


def k_for_load(k: int, load: int, rows: int = GRAPH_ROWS) -> int:
    """Draft tokens per round, at most `k`: as many as a round of `load` requests verifies within
    `rows` rows, one for each draft token and one for the token before."""
    return max(1, min(k, rows // load - 1))


def load_flags(load: int, k: int | None, gpus: int) -> VllmFlags:
    """Flags for a number of requests at a time, draft tokens per round and GPUs."""
    flags: dict[str, int] = {"max-num-seqs": load}
    if k is not None:
        # A round of P-EAGLE has up to 2·K rows a request in the head, and K + 1 in the target.
        flags["max-cudagraph-capture-size"] = 2 * k * load
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
