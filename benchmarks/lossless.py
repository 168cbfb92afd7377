"""Greedy float32 output with each head against the target alone, on all HumanEval prompts.

    python benchmarks/lossless.py [--limit N] [--k 7] [--nodes 4,16,40] [--batch 8]

Chains of both heads, then trees of P-EAGLE's with lookup.
Exits 1 when a first difference is not a tie (peagle.engine.ties.py), 0 otherwise.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from common import (
    PROBLEMS,
    TARGET,
    as_ids,
    decode,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    whole_numbers,
    write_json,
)

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.engine.ties import TIES, differences

DTYPE = "float32"


def compare_head(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]], params: SamplingParams
) -> dict[str, Any]:
    """One row: how the output with the head in use differs from the target's."""
    started = time.perf_counter()
    answers = decode(llm, prompts, params, llm.method)
    stats = sum((answer.stats for answer in answers), Stats())
    found = differences(llm.target, prompts, expected, [a.token_ids for a in answers])
    return {
        "method": llm.method,
        "k": llm.k,
        "nodes": llm.nodes or 0,
        "prompts": len(prompts),
        "identical": len(prompts) - len(found),
        "ties": sum(difference.tie for difference in found),
        "differences": [difference._asdict() for difference in found],
        "acceptance_length": round(stats.acceptance_length, 4),
        "seconds": round(time.perf_counter() - started, 1),
    }


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    size = f"{row['nodes']} nodes" if row["nodes"] else f"K = {row['k']}"
    print(f"{row['method']}, {size}: {row['identical']} of {row['prompts']} prompts "
          f"identical, {row['ties']} ties, AL {row['acceptance_length']}")  # fmt: skip
    for d in row["differences"]:
        kind = "tie" if d["tie"] else "DIFFERENT"
        print(
            f"  prompt {d['prompt']} token {d['position']}: {d['tokens']} gap {d['gap']:.2e} {kind}"
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    folders, params = heads(args), SamplingParams(max_tokens=args.max_tokens)
    llm = load(DTYPE, args.batch)
    prompts = as_ids(llm, human_eval(args.limit))
    expected = [answer.token_ids for answer in decode(llm, prompts, params, "none")]
    rows = []
    ways: list[tuple[Path, dict[str, int]]] = [(f, {"k": args.k}) for f in folders.values()]
    ways += [(folders["p-eagle"], {"nodes": nodes}) for nodes in args.nodes]
    for folder, pinned in ways:
        found = compare_head(llm.use(folder, **pinned), prompts, expected, params)
        rows.append({**found, "head": fingerprint(folder)})
        show(rows[-1])
    settings = {
        "target": TARGET,
        "dataset": "HumanEval",
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "output_tokens": sum(map(len, expected)),
        "temperature": 0,
        "dtype": DTYPE,
        "batch": args.batch,
        "tie_below": TIES[llm.target.dtype],
    }
    return {**environment(), "settings": settings, "rows": rows}


def main() -> None:
    parser = options(__doc__, "lossless.json")
    parser.add_argument("--limit", type=int, default=PROBLEMS, help="first N problems")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--k", type=int, default=7, help="draft tokens a round")
    parser.add_argument("--nodes", type=whole_numbers, default=[4, 16, 40], help="of trees")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    args = parser.parse_args()
    report = run(args)
    write_json(Path(args.output), report)
    sys.exit(any(not d["tie"] for row in report["rows"] for d in row["differences"]))


if __name__ == "__main__":
    main()
