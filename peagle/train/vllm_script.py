"""One greedy answer by vLLM, and its counters: `python vllm_script.py REQUEST.json RESPONSE.json`.

It runs in an interpreter that has vLLM and knows nothing of peagle (`train/vllm_parity.py` calls
it). REQUEST: `llm` (arguments of vllm.LLM), `prompt` (token ids), `max_tokens`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# Set before vLLM is imported, unless the caller has set them.
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
    "TOKENIZERS_PARALLELISM": "false",
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Token ids, rounds, and rounds whose i-th draft token was accepted."""
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415 (after the environment)

    llm = LLM(**request["llm"])
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], detokenize=False)
    prompt = TokensPrompt(prompt_token_ids=request["prompt"])
    [output] = llm.generate([prompt], params, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "token_ids": list(output.outputs[0].token_ids),
        "rounds": int(metrics["vllm:spec_decode_num_drafts"].value),
        "accepted": list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


def main() -> None:
    """Read the request, write the response."""
    request, response = map(Path, sys.argv[1:])
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    response.write_text(json.dumps(answer(json.loads(request.read_text()))))


if __name__ == "__main__":
    main()
