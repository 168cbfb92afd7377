"""The program of `peagle.engine.grammar_checker`: it compiles a grammar before an engine does. It
runs as a script and imports nothing but llguidance.

A child of it compiles each grammar, with little stack and little time: a grammar that makes native
code crash or hang ends that child alone.

The first line of the input is a JSON object: tokenizer (its JSON), vocabulary, ends, stack and
memory (bytes), seconds (of CPU time), limits (llguidance's). Each later one is a grammar as a JSON
string; the answer is a line with the child's exit code, negative for a signal.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STEPS = 8  # tokens that are tried


def limit(which: int, value: int) -> None:
    """Lower a limit of this process and its children."""
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


def exercise(grammar: str, tokenizer: LLTokenizer, limits: LLParserLimits) -> None:
    """Do what an engine does with a grammar: compile, copy, allow tokens, take them back."""
    state = LLMatcher(tokenizer, grammar, log_level=0, limits=limits).deep_copy()
    for step in range(STEPS):
        mask = state.compute_bitmask()
        allowed = [index for index, bits in enumerate(mask) if bits]
        if state.is_error() or not allowed:
            break
        index = allowed[step * len(allowed) // STEPS]
        lowest = mask[index] & -mask[index]
        state.consume_token(8 * index + lowest.bit_length() - 1)
    state.rollback(STEPS)


def in_child(grammar: str, tokenizer: LLTokenizer, setup: dict[str, Any]) -> int:
    """Exercise a grammar in a child of this process; its exit code, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        signal.alarm(4 * setup["seconds"])
        limit(resource.RLIMIT_CPU, setup["seconds"])
        limit(resource.RLIMIT_DATA, setup["memory"])
        exercise(grammar, tokenizer, LLParserLimits(**setup["limits"]))
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """Answer until the input ends."""
    setup = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(setup["tokenizer"], setup["vocabulary"], setup["ends"])
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_STACK, setup["stack"])
    for line in sys.stdin:
        print(in_child(json.loads(line), tokenizer, setup), flush=True)


if __name__ == "__main__":
    main()
