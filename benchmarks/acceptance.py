"""Acceptance length of both heads on HumanEval and MT-Bench, by K and draft position.

    python benchmarks/acceptance.py --mt-bench FILE.jsonl [--k 3,5,7] [--batch 8]
    python benchmarks/acceptance.py --mt-bench FILE.jsonl --trees --output FILE
    python benchmarks/acceptance.py --mt-bench FILE.jsonl --kinds --k 7 --output FILE
    python benchmarks/acceptance.py --context 150,1000,2000,4000,7500 --k 7 --limit 12
        --max-tokens 48 --batch 1 --output FILE

Greedy, chat template, every turn. Each (data set, drafts, head) is one row, written at once. A
second call measures only the rows that are missing or have other settings or another head. --trees
measures trees of 12 nodes, with lookup and without, in place of chains. --kinds measures each
category of MT-Bench. With --context HumanEval problems follow other ones, up to that number of
tokens of context, and heads are also measured without their window. Intervals of 95 % are a
bootstrap over conversations.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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

from peagle.bench.summary import DRAWS, acceptance_row
from peagle.data.chat import prompt_ids
from peagle.data.dataset import read_prompts
from peagle.data.records import read_records
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.model.drafter import Drafter
from peagle.train.processes import rebuilt

Conversations = list[list[str]]  # user turns
TREES = [
    Drafting("p-eagle", None, 12),
    Drafting("p-eagle", None, 12, lookup=True),
    Drafting("eagle3", None, 12, lookup=True),
]
NO_WINDOW = ", no window"  # in the names of data sets: the heads see all of the context
LONGEST = {"HumanEval": 512, "MT-Bench": 256}  # tokens of an answer; MT-Bench asks twice


class Cell(NamedTuple):
    """Key of a row in the table."""

    dataset: str
    drafting: Drafting


def datasets(args: argparse.Namespace) -> dict[str, Conversations]:
    """User turns of the conversations, by data set."""
    problems = human_eval()
    if args.context:
        each = {f"after {n} tokens": after(problems, args.limit, n) for n in args.context}
        return each | {name + NO_WINDOW: turns for name, turns in each.items()}
    if args.kinds:
        return by_kind(args.mt_bench)
    found = {"HumanEval": [[question] for question in problems[: args.limit]]}
    if args.mt_bench:
        found["MT-Bench"] = read_prompts(args.mt_bench)[: args.limit]
    return found


def by_kind(file: Path) -> dict[str, Conversations]:
    """User turns of MT-Bench's records, by their category."""
    found = defaultdict[str, Conversations](list)
    for record in read_records(file):
        found[f"MT-Bench, {record['category']}"].append(record["turns"])
    return found


def after(problems: list[str], limit: int, tokens: int) -> Conversations:
    """The first problems, each after as many of the last ones as have these tokens. Exits where
    these have fewer."""
    size = int(3.2 * tokens)  # characters of a token
    before = "\n\n".join(problems[limit:])[:size]
    if len(before) < size:
        sys.exit(f"the problems after --limit {limit} have no {tokens} tokens: lower it")
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


def without_window(llm: LLM, folder: Path) -> Drafter:
    """A head that sees its whole context."""
    drafter = llm.load_head(folder)
    sizes = replace(drafter.config.transformer, sliding_window=None)
    config = replace(drafter.config, transformer=sizes)
    return rebuilt(drafter, config, drafter.state_dict()).eval()


def answer(llm: LLM, conversations: Conversations, max_tokens: int) -> list[Stats]:
    """Answer every turn; later ones see the earlier answers. Statistics of each conversation."""
    found = [Stats() for _ in conversations]
    histories: list[list[dict[str, str]]] = [[] for _ in conversations]
    for turn in range(max(map(len, conversations))):
        open_ = [number for number, turns in enumerate(conversations) if turn < len(turns)]
        for number in open_:
            histories[number].append({"role": "user", "content": conversations[number][turn]})
        prompts = [prompt_ids(llm.tokenizer, histories[number]) for number in open_]
        answers = llm.generate(prompts, SamplingParams(max_tokens=max_tokens))
        for number, completion in zip(open_, answers, strict=True):
            histories[number].append({"role": "assistant", "content": completion.text})
            found[number] += completion.stats
    return found


def interval(above: list[int], below: list[int]) -> list[float]:
    """95 % interval of a ratio of sums over conversations."""
    draws = np.random.default_rng(0).integers(len(above), size=(DRAWS, len(above)))
    ratios = np.array(above)[draws].sum(1) / np.array(below)[draws].sum(1)
    return [round(float(edge), 4) for edge in np.quantile(ratios, [0.025, 0.975])]


def measure(llm: LLM, cell: Cell, conversations: Conversations, max_tokens: int) -> dict[str, Any]:
    """Measure one row."""
    started = time.perf_counter()
    each = answer(llm, conversations, max_tokens)
    rounds = [stats.rounds for stats in each]
    accepted = [stats.rounds + sum(stats.accepted) for stats in each]
    forwards = [stats.forwards for stats in each]
    tokens = [stats.tokens for stats in each]
    return {
        "dataset": cell.dataset,
        **cell.drafting.row,
        **acceptance_row(sum(each, Stats())),
        "acceptance_length_95": interval(accepted, rounds),
        "tokens_per_forward_95": interval(tokens, forwards),
        "rounds": sum(rounds),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(),
    }


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    shares = " ".join(f"{share:.3f}" for share in row["accepted_per_position"])
    name = f"{row['dataset']:9} {row['method']:7} {Drafting.from_row(row)}"
    per_forward = row["tokens_per_forward"]
    print(f"{name}  AL {row['acceptance_length']:.3f}  a forward {per_forward:.3f}  {shares}")


def run(args: argparse.Namespace) -> None:
    """Measure the cells that are missing."""
    folders = heads(args)
    before = json.loads(args.output.read_text())["rows"] if args.output.is_file() else []
    rows = {Cell(row["dataset"], Drafting.from_row(row)): row for row in before}
    chains = [Drafting(method, k) for k in args.k for method in folders]
    llm = load("bfloat16", args.batch)
    for name, conversations in datasets(args).items():
        longest = args.max_tokens or LONGEST.get(name.partition(",")[0], 64)
        for cell in (Cell(name, drafting) for drafting in (TREES if args.trees else chains)):
            folder = folders[cell.drafting.method]
            wanted = settings(args, conversations, folder, longest)
            if cell not in rows or rows[cell]["settings"] != wanted:
                whole = name.endswith(NO_WINDOW)
                head = without_window(llm, folder) if whole else folder
                used = llm.use(head, **cell.drafting.options)
                row = measure(used, cell, conversations, longest)
                rows[cell] = {**row, "settings": wanted}
                write_json(args.output, {"rows": list(rows.values())})
            show(rows[cell])


def main() -> None:
    parser = options(__doc__, "acceptance.json")
    parser.add_argument("--mt-bench", type=Path, help='MT-Bench, JSONL of {"turns": [...]}')
    parser.add_argument("--k", type=whole_numbers, default=[3, 5, 7], help="draft tokens a round")
    parser.add_argument("--trees", action="store_true", help="trees and lookup, not chains")
    parser.add_argument("--kinds", action="store_true", help="each category of MT-Bench")
    parser.add_argument("--context", type=whole_numbers, help="tokens before a HumanEval problem")
    parser.add_argument("--limit", type=int, default=PROBLEMS, help="first N of each data set")
    parser.add_argument("--max-tokens", type=int, help=f"longest answer, else {LONGEST}")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    args = parser.parse_args()
    if args.kinds and not args.mt_bench:
        parser.error("--kinds measures MT-Bench: name it with --mt-bench")
    run(args)


if __name__ == "__main__":
    main()
