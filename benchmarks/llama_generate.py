"""Generate from token ids with llama.cpp, greedily: a request a line in, a response a line out.

    python llama_generate.py

It runs in an interpreter that has llama-cpp-python, and knows nothing of peagle. A request is JSON:
`model` (a GGUF file), `context` (tokens a prompt and its answer may have), `threads`, which count
in the first one, `prompts` (token ids) and `max_tokens`. EOS does not end an answer. The response
holds `token_ids`, `seconds` (generation alone, after a warm-up), `acceptance_length` (1.0: nothing
is drafted) and `versions`. Of a prompt that begins as the one before, the beginning is not computed
again: llama-cpp-python's own doing.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any


def respond(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Warm up, generate, and return the response."""
    import llama_cpp

    list(islice(llm.generate(prompts[0], temp=0.0), 4))
    llm.reset()
    started = time.perf_counter()
    token_ids = [list(islice(llm.generate(ids, temp=0.0), max_tokens)) for ids in prompts]
    return {
        "token_ids": token_ids,
        "seconds": time.perf_counter() - started,
        "acceptance_length": 1.0,
        "versions": {
            "python": platform.python_version(),
            "llama-cpp-python": llama_cpp.__version__,
        },
    }


def responses(requests: Iterable[str]) -> Iterator[str]:
    """Load the first request's model, and answer all requests."""
    from llama_cpp import Llama

    llm = None
    for line in requests:
        request = json.loads(line)
        if llm is None:
            threads = request["threads"]
            llm = Llama(request["model"], n_ctx=request["context"], n_threads=threads,
                        n_threads_batch=threads, verbose=False)  # fmt: skip
        yield json.dumps(respond(llm, request["prompts"], request["max_tokens"])) + "\n"


def main() -> None:
    # What llama.cpp prints must not stand between the responses.
    with os.fdopen(os.dup(1), "w", buffering=1) as channel:
        os.dup2(2, 1)
        for response in responses(sys.stdin):
            channel.write(response)


if __name__ == "__main__":
    main()
