"""Runs documents through vLLM, which writes their hidden states: `python capture_script.py LLM`.

It runs in an interpreter that has vLLM and knows nothing of peagle (`vllm/capture.py` starts it).
LLM: JSON, arguments of vllm.LLM. A line of stdin is a list of documents, each a list of token ids;
a line of stdout lists their files. It ends with its input.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt


def run(llm: Any, documents: list[list[int]]) -> list[str]:
    """Return the file of each document's hidden states."""
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in documents]
    return [states_file(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def states_file(output: Any) -> str:
    """Return the file of the hidden states when it is written: vLLM holds a lock until then."""
    path: str = output.kv_transfer_params["hidden_states_path"]
    lock = Path(f"{path}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
    lock.unlink()
    return path


def main() -> None:
    """Documents in, files out."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with replies
    llm = LLM(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(run(llm, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
