"""A head with and without its correction: acceptance of chains and trees, and what scoring costs.

    python benchmarks/correction.py --corrected HEAD [--mt-bench FILE.jsonl] [--limit N]

bf16, greedy, chat template, every turn; `--p-eagle` is the head without the correction. `ms` is the
time to list candidates and to grow a tree of 12 for one request, of random hidden states: the
median over rounds of both heads in turns.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import (
    PROBLEMS,
    TARGET,
    environment,
    fingerprint,
    human_eval,
    load,
    options,
)

from peagle.bench.native import measure_acceptance
from peagle.bench.run import write_json
from peagle.data.dataset import read_prompts
from peagle.engine.draft import SIBLINGS, Chooser
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.tree import grow
from peagle.methods.base import NewSlots, Place
from peagle.model.drafter import Drafter

DRAFTS: dict[str, dict[str, Any]] = {
    "chain K = 3": {"k": 3},
    "chain K = 7": {"k": 7},
    "tree of 12": {"nodes": 12, "lookup": False},
    "tree of 12 + lookup": {"nodes": 12},
}
PLACES = 7
ROUNDS = 300  # that are timed


@torch.no_grad()
def choosing_ms(llm: LLM, heads: dict[str, Drafter]) -> dict[str, float]:
    """Milliseconds of a round's candidates and tree, by head."""
    taken: dict[str, list[float]] = {name: [] for name in heads}
    proposers = {name: llm.use(head, nodes=12).engine.proposer for name, head in heads.items()}
    places = [Place(0, depth) for depth in range(PLACES)]
    for _ in range(ROUNDS):
        states = torch.randn(PLACES, llm.target.config.hidden_size).to(llm.target.dtype)
        for name, proposer in proposers.items():
            assert proposer is not None
            started = time.perf_counter()
            slots = [NewSlots([0], 0, [100], PLACES)]
            chooser = Chooser(proposer, slots, [None], SIBLINGS, lambda _, prob: prob)
            chooser(places, states)
            [offer] = chooser.offers()
            grow(offer, 12)
            taken[name].append(time.perf_counter() - started)
    return {name: round(1e3 * median(seconds), 3) for name, seconds in taken.items()}


def run(args: argparse.Namespace) -> None:
    """Every head with every kind of draft, on every data set; written after every row."""
    folders = {"without": args.p_eagle, "with": args.corrected}
    data = {"HumanEval": [[question] for question in human_eval(args.limit)]}
    if args.mt_bench:
        data["MT-Bench"] = read_prompts(args.mt_bench)[: args.limit]
    llm = load("bfloat16", args.batch)
    heads = {name: llm.load_head(folder) for name, folder in folders.items()}
    params = SamplingParams(max_tokens=args.max_tokens)
    settings = {
        "target": TARGET,
        "heads": {name: fingerprint(folder) for name, folder in folders.items()},
        "max_tokens": args.max_tokens,
        "limit": args.limit,
    }
    rows = list[dict[str, Any]]()
    report = {**environment(), "settings": settings, "ms": choosing_ms(llm, heads), "rows": rows}
    print(f"candidates and tree of a round: {report['ms']} ms")
    for dataset, conversations in data.items():
        for draft, how in DRAFTS.items():
            for name, head in heads.items():
                found = measure_acceptance(llm.use(head, **how), conversations, params)
                rows.append({"dataset": dataset, "draft": draft, "correction": name, **found})
                length = found["acceptance_length"]
                print(f"{dataset:9} {draft:19} {name:7} AL {length:.3f}", flush=True)
                write_json(args.output, report)


def main() -> None:
    parser = options(__doc__, "correction.json")
    parser.add_argument("--corrected", type=Path, required=True, metavar="HEAD",
                        help="folder of the head with its correction")  # fmt: skip
    parser.add_argument("--mt-bench", type=Path, help='MT-Bench, JSONL of {"turns": [...]}')
    parser.add_argument("--limit", type=int, default=PROBLEMS, help="first N of each data set")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    args = parser.parse_args()
    run(args)


if __name__ == "__main__":
    main()
