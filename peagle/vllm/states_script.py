"""Hidden states of documents by vLLM: `python states_script.py FOLDER LLM`.

It runs in an interpreter that has vLLM and knows nothing of peagle (`vllm/capture.py` calls
it). LLM: JSON, arguments of vllm.LLM. A line of stdin: a list of documents, each a list of token
ids. When their states are in FOLDER/0.safetensors, 1.safetensors … (counted from the first line
on), a line of stdout says so. It ends with its input.
"""

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.platforms import current_platform


def load(folder: Path, arguments: dict[str, Any]) -> Any:
    """A vllm.LLM that writes states to `folder`."""
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if current_platform.is_cpu():
        connector = {"kv_connector": "CpuConnector", "kv_connector_module_path": "cpu_connector"}
    where = {
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return LLM(**arguments, kv_transfer_config={**connector, **where})


def take(path: Path, name: str) -> None:
    """Give a file its name when it is written: vLLM holds a lock until then."""
    lock = path.with_name(f"{path.name}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
    lock.unlink()
    path.rename(path.with_name(name))


def main() -> None:
    """Documents in, files out."""
    folder = Path(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints is no reply
    llm = load(folder, json.loads(sys.argv[2]))
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    count = 0
    for line in sys.stdin:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(line)]
        for output in llm.generate(prompts, params, use_tqdm=False):
            take(Path(output.kv_transfer_params["hidden_states_path"]), f"{count}.safetensors")
            count += 1
        print(count, file=replies, flush=True)


if __name__ == "__main__":
    main()
