"""Greedy answers by vLLM, and their counters: `python parity_script.py LLM`.

It runs in an interpreter that has vLLM and knows nothing of peagle (`vllm/parity.py` calls it).
LLM: JSON, arguments of vllm.LLM. A line of stdin is an object: `prompt` (token ids) and
`max_tokens`; a line of stdout is the answer. It ends with its input.
"""

import json
import os
import sys
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return token ids, rounds, and rounds whose i-th draft token was accepted."""
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
    """Requests in, answers out."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no reply
    llm = LLM(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
