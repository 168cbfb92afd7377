"""Acceptance length of both heads on HumanEval and MT-Bench, by K and draft position.

    python benchmarks/acceptance.py --mt-bench FILE.jsonl [--k 3,5,7] [--batch 8]
    python benchmarks/acceptance.py --context 150,1000,4000,8000 --limit 4 --k 7 [--output FILE]

Greedy, chat template, every turn. Each (data set, K, head) is one row, written at once. A second
call measures only the rows that are missing or have other settings or another head. With --context
HumanEval problems follow other ones, up to that number of tokens of context.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    PROBLEMS,
    TARGET,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    whole_numbers,
    write_json,
)

from peagle.bench.native import measure_acceptance
from peagle.cli.common import progress_bar
from peagle.data.dataset import read_prompts
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams

Conversations = list[list[str]]  # user turns
LONGEST = {"HumanEval": 512, "MT-Bench": 256}  # tokens of an answer; MT-Bench asks twice


class Cell(NamedTuple):
    """Key of a row in the table."""

    dataset: str
    k: int
    method: str


def datasets(args: argparse.Namespace) -> dict[str, Conversations]:
    """User turns of the conversations, by data set."""
    problems = human_eval()
    if args.context:
        return {
            f"after {count} tokens": after(problems, args.limit, count) for count in args.context
        }
    found = {"HumanEval": [[question] for question in problems[: args.limit]]}
    if args.mt_bench:
        found["MT-Bench"] = read_prompts(args.mt_bench)[: args.limit]
    return found


def after(problems: list[str], limit: int, tokens: int) -> Conversations:
    """The first problems, each after as many of the last ones as have these tokens."""
    before = "\n\n".join(problems[limit:])[: int(3.2 * tokens)]  # characters of a token
    return [[f"{before}\n\n{problem}"] for problem in problems[:limit]]


def settings(
    args: argparse.Namespace, conversations: Conversations, head: Path, max_tokens: int
) -> dict[str, Any]:
    """Settings that a row's numbers depend on."""
    return {
        "target": TARGET,
        "head": fingerprint(head),
        "conversations": len(conversations),
        "max_tokens": max_tokens,
        "temperature": 0,
        "dtype": "bfloat16",
        "batch": args.batch,
    }


def measure(llm: LLM, cell: Cell, conversations: Conversations, max_tokens: int) -> dict[str, Any]:
    """Measure one row."""
    started = time.perf_counter()
    with progress_bar(f"{cell.dataset} {cell.method} K = {cell.k}") as bar:
        task = bar.add_task("", total=sum(map(len, conversations)))
        params = SamplingParams(max_tokens=max_tokens)
        found = measure_acceptance(llm, conversations, params, lambda n: bar.advance(task, n))
    seconds = round(time.perf_counter() - started, 1)
    return {**cell._asdict(), **found, "seconds": seconds, **environment()}


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    shares = " ".join(f"{share:.3f}" for share in row["accepted_per_position"])
    name = f"{row['dataset']:9} {row['method']:7} K = {row['k']}"
    print(f"{name}  AL {row['acceptance_length']:.3f}  per position {shares}", flush=True)


def run(args: argparse.Namespace) -> None:
    """Measure the cells that are missing."""
    folders = heads(args)
    before = json.loads(args.output.read_text())["rows"] if args.output.is_file() else []
    rows = {Cell(row["dataset"], row["k"], row["method"]): row for row in before}
    llm = load("bfloat16", args.batch)
    for name, conversations in datasets(args).items():
        longest = args.max_tokens or LONGEST.get(name, 64)
        for cell in (Cell(name, k, method) for k in args.k for method in folders):
            wanted = settings(args, conversations, folders[cell.method], longest)
            if cell not in rows or rows[cell]["settings"] != wanted:
                used = llm.use(folders[cell.method], cell.k)
                row = measure(used, cell, conversations, longest)
                rows[cell] = {**row, "settings": wanted}
                write_json(args.output, {"rows": list(rows.values())})
            show(rows[cell])


def main() -> None:
    parser = options(__doc__, "acceptance.json")
    parser.add_argument("--mt-bench", type=Path, help='MT-Bench, JSONL of {"turns": [...]}')
    parser.add_argument("--k", type=whole_numbers, default=[3, 5, 7], help="draft tokens a round")
    parser.add_argument("--context", type=whole_numbers, help="tokens before a HumanEval problem")
    parser.add_argument("--limit", type=int, default=PROBLEMS, help="first N of each data set")
    parser.add_argument("--max-tokens", type=int, help=f"longest answer, else {LONGEST}")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
