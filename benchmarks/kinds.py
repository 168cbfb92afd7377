"""Acceptance by kind of text, and how much of each kind a draft vocabulary covers.

    peagle data regenerate smollm2-135m --prompts held_out.jsonl --output held_out_answers.jsonl
    python benchmarks/kinds.py --prompts held_out.jsonl --answers held_out_answers.jsonl \
        --training answers.jsonl.gz more.jsonl

Prompts are of `heads/prompts.py`: each has a kind. The vocabulary of every size holds the most
frequent tokens of the training answers, as training chooses it; covered is the share of the tokens
of the held-out answers that are in it. Greedy, bf16, first 128 tokens of an answer; EAGLE-3 drafts
chains of 7, P-EAGLE chains of 7 and trees of 12, without lookup.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import environment, fingerprint, heads, load, options, whole_numbers, write_json

from peagle.bench.summary import acceptance_row
from peagle.data.dataset import read_records
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.model.vocab import frequent_tokens

DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-3, chain K = 7": ("eagle3", {"k": 7}),
    "P-EAGLE, chain K = 7": ("p-eagle", {"k": 7}),
    "P-EAGLE, tree of 12": ("p-eagle", {"nodes": 12, "lookup": False}),
}
MAX_TOKENS = 128

Answers = dict[str, list[dict[str, Any]]]  # by kind


def read_answers(prompts: Path, answers: Path) -> Answers:
    """Answered turns by kind."""
    kinds = [record["kind"] for record in read_records(prompts)]
    found: Answers = defaultdict(list)
    for line in read_records(answers):
        found[kinds[line["record"]]].append(line)
    return dict(sorted(found.items()))


def covered(answers: Answers, training: list[list[int]], sizes: list[int], vocab: int) -> Answers:
    """Rows of what each size covers of each kind."""
    rows: Answers = defaultdict(list)
    for size in sizes:
        known = torch.zeros(vocab, dtype=torch.bool)
        known[frequent_tokens(training, vocab, size)] = True
        for kind, lines in answers.items():
            tokens = torch.tensor([token for line in lines for token in line["answer_ids"]])
            share = known[tokens].double().mean().item()
            rows[kind].append({"size": size, "share": round(share, 4)})
    return rows


def acceptance(llm: LLM, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one kind."""
    prompts = [line["prompt_ids"] for line in lines]
    answers = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    total = sum((answer.stats for answer in answers), Stats())
    row = acceptance_row(total)
    return {name: row[name] for name in ("acceptance_length", "accepted_per_position")}


def run(args: argparse.Namespace) -> None:
    """Every kind with every kind of draft; written after every row."""
    folders = heads(args)
    llm = load("bfloat16", args.batch)
    answers = read_answers(args.prompts, args.answers)
    training = [line["answer_ids"] for path in args.training for line in read_records(path)]
    vocab = llm.target.embedding.shape[0]
    coverage = covered(answers, training, args.sizes, vocab)
    report = {
        **environment(),
        "heads": {name: fingerprint(folder) for name, folder in folders.items()},
        "training_tokens": sum(map(len, training)),
        "rows": [],
    }
    drafters = {name: llm.load_head(folder) for name, folder in folders.items()}
    for kind, lines in answers.items():
        row: dict[str, Any] = {"kind": kind, "turns": len(lines), "covered": coverage[kind]}
        for draft, (method, how) in DRAFTS.items():
            row[draft] = acceptance(llm.use(drafters[method], **how), lines)
        report["rows"].append(row)
        lengths = {draft: row[draft]["acceptance_length"] for draft in DRAFTS}
        print(f"{kind:16} {lengths} covered {[part['share'] for part in coverage[kind]]}")
        write_json(args.output, report)


def main() -> None:
    parser = options(__doc__, "kinds.json")
    parser.add_argument("--prompts", type=Path, required=True, help="held_out.jsonl")
    parser.add_argument("--answers", type=Path, required=True, help="the target's answers to them")
    parser.add_argument(
        "--training", type=Path, nargs="+", required=True, help="answers trained on"
    )
    parser.add_argument(
        "--sizes", type=whole_numbers, default=[4096, 7680, 12288, 16384, 32768],
        help="draft vocabularies",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
