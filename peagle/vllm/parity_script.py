"""One greedy answer by vLLM, and its counters: `parity_script.py REQUEST.json RESPONSE.json`.

It runs in an interpreter that has vLLM and knows nothing of peagle (`vllm/parity.py` calls
it). REQUEST: `llm` (arguments of vllm.LLM), `prompt` (token ids), `max_tokens`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Token ids, rounds, and rounds whose i-th draft token was accepted."""
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
    response.write_text(json.dumps(answer(json.loads(request.read_text()))))


if __name__ == "__main__":
    main()
