"""Tokens per second of each head at K = 1 … 7: how the catalog's K is chosen.

    python benchmarks/best_k.py [--k 1,2,3,4,5,6,7] [--limit 10] [--max-tokens 96]

On the first HumanEval prompts; the demo answers the last ones. One request at a time, greedy, all
methods and K interleaved.
"""

import argparse
from typing import Any

from common import (
    METHODS,
    TARGET,
    as_ids,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    whole_numbers,
    write_json,
)

from peagle.bench.side_by_side import Contender, compare, identical
from peagle.cli.common import progress_bar
from peagle.engine.params import SamplingParams


def best(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The fastest K of each method."""
    of = {method: [row for row in rows if row["method"] == method] for method in METHODS}
    return {
        method: max(own, key=lambda r: r["tokens_per_second"])["k"] for method, own in of.items()
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    folders, llm = heads(args), load(args.dtype)
    prompts, contenders = as_ids(llm, human_eval(args.limit)), [Contender("none", None, None)]
    for method, folder in folders.items():
        drafter = llm.load_head(folder)
        contenders += [Contender(method, drafter, k) for k in args.k]
    with progress_bar("prompts") as bar:
        task = bar.add_task("", total=len(prompts))
        params = SamplingParams(max_tokens=args.max_tokens)
        compare(llm, contenders, prompts, params, lambda: bar.advance(task))
    rows = [contender.row() for contender in contenders]
    settings = {
        "target": TARGET,
        "heads": {method: fingerprint(folder) for method, folder in folders.items()},
        "dataset": "HumanEval",
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "dtype": args.dtype,
    }
    found = {"best_k": best(rows), "identical": identical(contenders), "rows": rows}
    return {**environment(), "settings": settings, **found}


def main() -> None:
    parser = options(__doc__, "best_k.json")
    parser.add_argument("--k", type=whole_numbers, default=list(range(1, 8)), help="to try")
    parser.add_argument("--limit", type=int, default=10, help="first N problems")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    args = parser.parse_args()
    report = run(args)
    for row in report["rows"]:
        speed = f"{row['tokens_per_second']:6.1f} tok/s  AL {row['acceptance_length']:.2f}"
        print(f"{row['method']:7} K = {row['k']}  {speed}")
    print(f"best K: {report['best_k']}    token ids identical: {report['identical']}")
    write_json(args.output, report)


if __name__ == "__main__":
    main()
