"""A server of a tiny target, as a script: a process of its own, which an attack may end.

Prints its address, then serves. `--header-seconds` and `--body-seconds` lower those limits.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import CHATML, make_drafter, make_target

from peagle.engine.llm import LLM
from peagle.server import middleware, run
from peagle.server.app import ServerConfig

MODEL = "tiny"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--header-seconds", type=float, default=run.HEADER_SECONDS)
    parser.add_argument("--body-seconds", type=float, default=middleware.BODY_SECONDS)
    given = parser.parse_args()
    run.HEADER_SECONDS, middleware.BODY_SECONDS = given.header_seconds, given.body_seconds
    target = make_target()
    assert target.tokenizer is not None
    target.tokenizer.chat_template = CHATML + "{# <tool_call> #}"  # so tools can be demanded
    llm = LLM(target, make_drafter(target, "p-eagle"), k=3, max_batch=4, kv_tokens=4096)
    listening = run.bind("127.0.0.1", 0)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    run.serve(llm, ServerConfig(MODEL), listening)


if __name__ == "__main__":
    main()
