"""Memory that a process holds for training documents: as lists, and mapped from files.

    python benchmarks/data_memory.py [--tokens 1000000,4000000]

Each row is a process of its own that opens a data file as `peagle train` does and goes through all
its documents: "first" tokenises it, "mapped" finds it tokenised, "lists" holds every document as
the Python lists that training kept before. Anonymous memory, which no other process shares and the
system cannot drop, is counted before and after. Results: benchmarks/results/data_memory.json.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import TARGET, environment, options, whole_numbers, write_json

from peagle.data.dataset import read_examples
from peagle.model.template import load_tokenizer

LENGTH = 512  # tokens of a document, two thirds of them answer
WAYS = ("first", "mapped", "lists")


def write_data(file: Path, tokens: int) -> None:
    """Documents of random ids."""
    rng = random.Random(0)
    with file.open("w") as out:
        for _ in range(tokens // LENGTH):
            ids = [rng.randrange(1000, 40000) for _ in range(LENGTH)]
            prompt = LENGTH // 3
            record = {"prompt_ids": ids[:prompt], "answer_ids": ids[prompt:]}
            out.write(json.dumps(record) + "\n")


def anonymous() -> int:
    """Bytes of this process that are backed by no file."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def measure(file: Path, way: str) -> dict[str, Any]:
    """Open the documents in this process, and go through them."""
    tokenizer = load_tokenizer(TARGET)
    before = anonymous()
    started = time.perf_counter()
    documents: Any = read_examples(file, tokenizer, LENGTH)
    if way == "lists":
        documents = list(documents)
    seconds = time.perf_counter() - started
    tokens = sum(len(example.ids) for example in documents)
    held = anonymous() - before
    return {"tokens": tokens, "held_megabytes": round(held / 1e6, 1), "seconds": round(seconds, 2)}


def run(sizes: list[int]) -> list[dict[str, Any]]:
    """A row for each size and way."""
    rows = []
    for tokens in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "data.jsonl"
            write_data(file, tokens)
            for way in WAYS:
                command = [sys.executable, __file__, "--measure", way, str(file)]
                own = os.environ | {"PEAGLE_HOME": folder}
                done = subprocess.run(command, env=own, check=True, capture_output=True, text=True)
                rows.append({"way": way, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def main() -> None:
    """Measure in processes of its own, and write the report."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[3]), sys.argv[2])))
        return
    parser = argparse.ArgumentParser(parents=[options(__doc__, "data_memory.json")], add_help=False)
    parser.add_argument("--tokens", type=whole_numbers, default=[1_000_000, 4_000_000])
    args = parser.parse_args()
    write_json(args.output, {**environment(), "length": LENGTH, "rows": run(args.tokens)})


if __name__ == "__main__":
    main()
