"""Time of one drafter step, without verification, at several K: one forward or K of them.

    python benchmarks/draft_cost.py [--k 1,3,5,7] [--repeats 60]

Batch 1, after a real prefix; three new slots, as after a round that accepted two draft tokens.
Head and K change from call to call, so that noise hits all alike; medians.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from common import (
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

from peagle.backends.batch import blocks_of, slots_of
from peagle.engine.draft import Proposer
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.methods.base import NewSlots
from peagle.model.attention import CausalAttend

NEW = 3  # slots


class Step(NamedTuple):
    """A drafter in the middle of an answer; every call of `propose` starts from the same state."""

    proposer: Proposer
    slots: NewSlots


def prefix(llm: LLM, length: int) -> list[int]:
    """A HumanEval prompt and the target's own answer, `length` tokens run and the next one."""
    prompt = as_ids(llm, human_eval(1))[0]
    params = SamplingParams(max_tokens=max(1, length + 1 - len(prompt)), ignore_eos=True)
    return [*prompt, *llm.generate([prompt], params)[0].token_ids][: length + 1]


def prepare(llm: LLM, head: Path, ids: list[int], room: int) -> Step:
    """Fill the drafter's cache up to the new slots."""
    drafter, run = llm.load_head(head), len(ids) - 1
    layers = drafter.config.feature_layers
    out = llm.target.forward(torch.tensor(ids[:-1]), torch.arange(run), CausalAttend(), layers)
    blocks = range(blocks_of(run + room))
    proposer = llm._loaded.proposer(drafter, len(blocks))
    proposer.features.write(torch.tensor(slots_of(blocks, 0, run)), out.features)
    start = run - NEW
    proposer.propose([NewSlots(blocks, 0, ids[1 : start + 1], 1)])
    return Step(proposer, NewSlots(blocks, start, ids[start + 1 :], 1))


def measure(
    steps: dict[str, Step], depths: list[int], repeats: int
) -> dict[tuple[str, int], float]:
    """Median seconds by method and K."""
    cases = [(method, k) for method in steps for k in depths]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for repeat in range(-3, repeats):  # the first three warm up
        turn = repeat % len(cases)
        for method, k in cases[turn:] + cases[:turn]:
            proposer, slots = steps[method]
            started = time.perf_counter()
            proposer.propose([slots._replace(depth=k)])
            if repeat >= 0:
                seconds[method, k].append(time.perf_counter() - started)
    return {case: median(times) for case, times in seconds.items()}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    folders, llm = heads(args), load(args.dtype)
    ids, depths = prefix(llm, args.prefix), sorted({1, *args.k})
    steps = {m: prepare(llm, folder, ids, max(depths)) for m, folder in folders.items()}
    medians = measure(steps, depths, args.repeats)
    rows = [
        {
            "method": method,
            "k": k,
            "milliseconds": round(1000 * seconds, 3),
            "ratio_to_k1": round(seconds / medians[method, 1], 3),
        }
        for (method, k), seconds in medians.items()
    ]
    settings = {
        "target": TARGET,
        "heads": {method: fingerprint(folder) for method, folder in folders.items()},
        "dtype": args.dtype,
        "batch": 1,
        "prefix": args.prefix,
        "new_slots": NEW,
        "repeats": args.repeats,
    }
    return {**environment(), "settings": settings, "rows": rows}


def main() -> None:
    parser = options(__doc__, "draft_cost.json")
    parser.add_argument("--k", type=whole_numbers, default=[1, 3, 5, 7], help="draft tokens")
    parser.add_argument("--prefix", type=int, default=200, help="tokens before the draft")
    parser.add_argument("--repeats", type=int, default=60, help="calls of each method and K")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    args = parser.parse_args()
    report = run(args)
    for row in report["rows"]:
        cost = f"{row['milliseconds']:7.2f} ms  {row['ratio_to_k1']:.2f} × K = 1"
        print(f"{row['method']:7} K = {row['k']}  {cost}")
    write_json(args.output, report)


if __name__ == "__main__":
    main()
