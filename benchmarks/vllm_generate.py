"""Generate from token ids with vLLM, offline and greedily, and report its acceptance counters.

    python vllm_generate.py REQUEST.json RESPONSE.json
    python vllm_generate.py    # a request a line in, a response a line out, until the input ends

A parity oracle and a baseline: it runs in vLLM's own environment and knows nothing of peagle.
The request is the JSON form of `Request` (target and prompts are required). The response holds
`token_ids` (a stopping EOS included), `rounds`, `draft_tokens`, `accepted_tokens`,
`accepted_per_position` (accepted drafts at position i / rounds), `acceptance_length`
(1 + accepted / rounds; 1.0 without drafts), `seconds` (generation alone, after a warm-up),
`output_tokens`, `tokens_per_second`, `startup_seconds`, `settings` and `versions`. Of several
requests the first one says what is started; of the others prompts, max_tokens, ignore_eos and
concurrency count.
vLLM counts accepted drafts before it cuts at EOS or at the length limit.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# Set before vLLM and torch are imported, unless the caller has set them.
# One process: vLLM's worker process would bind to all cores but one; here OMP_NUM_THREADS rules.
# One model runner for every method: only V1 drafts in parallel.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, for target and drafter together
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # target and head are folders
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What to run."""

    target: str  # model folder
    prompts: list[list[int]]  # token ids
    head: str | None = None  # drafter folder, vLLM dialect; None for method "none"
    method: str = "p-eagle"  # "p-eagle", "eagle3" or "none"
    k: int = 7  # draft tokens a round
    dtype: str = "float32"  # "float32" or "bfloat16", target and drafter alike
    max_tokens: int = 128  # new tokens a prompt
    ignore_eos: bool = False
    max_num_seqs: int = 1  # prompts decoded together, at most
    concurrency: int | None = None  # the same, in this request; None: max_num_seqs
    prefix_caching: bool = False  # within a request; none finds anything of the one before
    compile: bool = False  # torch.compile (inductor) instead of eager
    whole_caches: bool = False  # a KV cache of all positions for every layer, windowed ones too
    max_model_len: int = 1024  # prompt + output + K must fit

    def __post_init__(self) -> None:
        if self.method not in ("p-eagle", "eagle3", "none"):
            raise ValueError(f"method is {self.method!r}; use p-eagle, eagle3 or none")
        if (self.head is None) != (self.method == "none"):
            raise ValueError("a head goes with p-eagle and eagle3, and only with them")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; use float32 or bfloat16")
        if not self.prompts or not all(self.prompts):
            raise ValueError("prompts must be non-empty lists of token ids")


class Counters(NamedTuple):
    """vLLM's speculative-decoding counters since the engine started."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    accepted_at: list[int]  # by draft position; empty without speculation


def set_environment() -> None:
    """Fill in what the caller left unset; without a thread count vLLM may fall back to one."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def speculative_config(request: Request) -> dict[str, Any] | None:
    """The value of `--speculative-config`, or None to decode without drafts."""
    if request.method == "none":
        return None
    config = {"method": "eagle3", "model": request.head, "num_speculative_tokens": request.k}
    return {**config, "parallel_drafting": True} if request.method == "p-eagle" else config


def build_llm(request: Request) -> Any:
    """A vllm.LLM for the request; vLLM is imported here, after the environment is set."""
    from vllm import LLM

    return LLM(
        model=request.target,
        speculative_config=speculative_config(request),
        dtype=request.dtype,
        max_model_len=request.max_model_len,
        max_num_seqs=request.max_num_seqs,
        enforce_eager=not request.compile,
        enable_prefix_caching=request.prefix_caching,
        disable_hybrid_kv_cache_manager=request.whole_caches,
        disable_log_stats=False,  # get_metrics() needs them
        seed=0,
    )


def generate(
    llm: Any, request: Request, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """Greedy new token ids of each prompt, in order; `concurrency` prompts at a time."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine, waiting, done = llm.llm_engine, list(enumerate(prompts)), dict[int, list[int]]()
    running, most = 0, request.concurrency or request.max_num_seqs
    while waiting or running:
        while waiting and running < most:
            index, prompt = waiting.pop(0)
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), params)
            running += 1
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
                running -= 1
    return [done[index] for index in range(len(prompts))]


def read_counters(llm: Any) -> Counters:
    """The counters now; zeros when vLLM has none (no speculation)."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}

    def count(name: str) -> int:
        return int(metrics[name].value) if name in metrics else 0

    per_position = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return Counters(
        rounds=count("vllm:spec_decode_num_drafts"),
        draft_tokens=count("vllm:spec_decode_num_draft_tokens"),
        accepted_tokens=count("vllm:spec_decode_num_accepted_tokens"),
        accepted_at=list(per_position.values) if per_position else [],
    )


def since(before: Counters, after: Counters) -> Counters:
    """What was counted between two readings."""
    return Counters(
        rounds=after.rounds - before.rounds,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        accepted_at=[b - a for a, b in zip(before.accepted_at, after.accepted_at, strict=True)],
    )


def acceptance(counters: Counters) -> dict[str, Any]:
    """The counters and their ratios under the response's names."""
    rounds = max(counters.rounds, 1)  # no rounds: nothing accepted either
    return {
        "rounds": counters.rounds,
        "draft_tokens": counters.draft_tokens,
        "accepted_tokens": counters.accepted_tokens,
        "accepted_per_position": [n / rounds for n in counters.accepted_at],
        "acceptance_length": 1 + counters.accepted_tokens / rounds,
    }


def settings(request: Request) -> dict[str, Any]:
    """What the numbers depend on besides the prompts."""
    import torch

    return {
        "speculative_config": speculative_config(request),
        "dtype": request.dtype,
        "compile": request.compile,
        "max_num_seqs": request.max_num_seqs,
        "threads": torch.get_num_threads(),
        "preload": [
            Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name
        ],
        "environment": {name: os.environ[name] for name in ENVIRONMENT},
    }


def respond(llm: Any, request: Request, startup_seconds: float) -> dict[str, Any]:
    """Warm up, generate, and return the response."""
    generate(llm, request, request.prompts[:1], max_tokens=4)
    llm.reset_prefix_cache()
    before, ready = read_counters(llm), time.perf_counter()
    token_ids = generate(llm, request, request.prompts, request.max_tokens)
    seconds = time.perf_counter() - ready
    output_tokens = sum(map(len, token_ids))
    return {
        "token_ids": token_ids,
        **acceptance(since(before, read_counters(llm))),
        "seconds": seconds,
        "output_tokens": output_tokens,
        "tokens_per_second": output_tokens / seconds,
        "startup_seconds": startup_seconds,
        "settings": settings(request),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
        },
    }


def responses(requests: Iterable[str]) -> Iterator[str]:
    """Start vLLM for the first request, a line of JSON, and answer all of them."""
    llm, startup_seconds = None, 0.0
    for line in requests:
        request = Request(**json.loads(line))
        if llm is None:
            set_environment()
            started = time.perf_counter()
            llm = build_llm(request)
            startup_seconds = time.perf_counter() - started
        yield json.dumps(respond(llm, request, startup_seconds)) + "\n"


def main() -> None:
    if len(sys.argv) == 1:
        # What vLLM and its libraries print must not stand between the responses.
        with os.fdopen(os.dup(1), "w", buffering=1) as channel:
            os.dup2(2, 1)
            for response in responses(sys.stdin):
                channel.write(response)
    elif len(sys.argv) == 3:
        request_file, response_file = map(Path, sys.argv[1:])
        [response] = responses([request_file.read_text()])
        response_file.write_text(response)
    else:
        sys.exit("usage: python vllm_generate.py [REQUEST.json RESPONSE.json]")


if __name__ == "__main__":
    main()
