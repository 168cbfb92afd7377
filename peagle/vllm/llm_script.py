"""Greedy outputs of vLLM: `python llm_script.py LLM`.

It runs in an interpreter that has vLLM and knows nothing of peagle (`vllm/llm.py` starts it). LLM:
JSON, arguments of vllm.LLM. A line of stdin is an object: `prompts` (lists of token ids) and
`max_tokens`; a line of stdout is the reply. It ends with its input.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt


def reply(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return by prompt its output and the file of its hidden states, and the counters of drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    metrics = [metric for metric in llm.get_metrics() if "spec_decode" in metric.name]
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "files": [states_file(output) for output in outputs],
        "counters": {m.name: m.values if hasattr(m, "values") else m.value for m in metrics},
    }


def states_file(output: Any) -> str | None:
    """Return the file of the hidden states when it is written: vLLM holds a lock until then."""
    if not output.kv_transfer_params:
        return None
    path: str = output.kv_transfer_params["hidden_states_path"]
    lock = Path(f"{path}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
    lock.unlink()
    return path


def main() -> None:
    """Requests in, replies out."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no reply
    llm = LLM(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(reply(llm, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
