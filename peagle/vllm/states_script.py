"""Hidden states of documents by vLLM: `python states_script.py FOLDER LLM`.

It runs in an interpreter that has vLLM and knows nothing of peagle (`vllm/capture.py` calls it).
LLM: JSON, arguments of vllm.LLM. A line of stdin is a list of documents, each a list of token ids.
When their states are written, a line of stdout lists the files, which are in FOLDER. It ends with
its input.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.platforms import current_platform


def load(folder: str, arguments: dict[str, Any]) -> Any:
    """Return a vllm.LLM that writes states to `folder`."""
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    if current_platform.is_cpu():
        transfer["kv_connector"] = "CpuConnector"
        transfer["kv_connector_module_path"] = "cpu_connector"
    return LLM(**arguments, kv_transfer_config=transfer)


def written(output: Any) -> str:
    """Return the file of an output when it is written: vLLM holds a lock until then."""
    path: str = output.kv_transfer_params["hidden_states_path"]
    lock = Path(f"{path}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
    lock.unlink()
    return path


def main() -> None:
    """Documents in, files out."""
    folder, arguments = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no reply
    llm = load(folder, json.loads(arguments))
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    for line in sys.stdin:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(line)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([written(output) for output in outputs]), file=replies, flush=True)


if __name__ == "__main__":
    main()
