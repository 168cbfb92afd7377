"""Acceptance length of both heads as the context before the answer grows.

    python benchmarks/context_length.py [--lengths 256,512,1024,2048,4096] [--k 7]

Every prompt is a HumanEval question behind earlier turns of one conversation: other questions, each
with the target's own greedy answer. The same questions are asked at every length, behind as many of
their conversation's first turns as fit. Greedy, chat template. Each (length, head) is one row,
written when it is done; a second call goes on. Writes a table and a plot.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from common import (
    TARGET,
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

from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.paths import cache_dir

Messages = list[dict[str, str]]
BATCH = 8  # prompts decoded together


class Cell(NamedTuple):
    """What makes a row: the table holds one of each."""

    length: int
    method: str


def ids(llm: LLM, history: Messages, question: str) -> list[int]:
    """The prompt that asks a question behind a history."""
    return prompt_ids(llm.tokenizer, [*history, {"role": "user", "content": question}])


def asked(llm: LLM, args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The questions that are measured, the first that fit the least length, and all others."""
    every, least = human_eval(), min(args.lengths)
    measured = [q for q in every if len(ids(llm, [], q)) <= least][: args.prompts]
    return measured, [q for q in every if q not in measured]


def conversations(llm: LLM, questions: list[str], args: argparse.Namespace) -> list[Messages]:
    """As many histories as prompts, of other questions each, longer than the greatest length.
    They take longer to make than to measure: kept after every turn, and gone on with."""
    settings = {"target": TARGET, "dtype": args.dtype, "answer": args.history_tokens,
                "histories": args.prompts, "length": max(args.lengths)}  # fmt: skip
    file = cache_dir() / "benchmarks" / "context_length.json"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    histories: list[Messages] = [[] for _ in range(args.prompts)]
    if kept.get("settings") == settings:
        histories = kept["histories"]
    llm = llm.use(None)
    params = SamplingParams(max_tokens=args.history_tokens)
    while min(len(ids(llm, h, "")) for h in histories) < max(args.lengths):
        turn = len(histories[0]) // 2
        first = turn * args.prompts  # they come round again when all were asked
        asks = [questions[(first + i) % len(questions)] for i in range(args.prompts)]
        prompts = [ids(llm, h, ask) for h, ask in zip(histories, asks, strict=True)]
        answers = decode(llm, prompts, params, f"earlier turn {turn + 1}")
        for history, ask, answer in zip(histories, asks, answers, strict=True):
            history.append({"role": "user", "content": ask})
            history.append({"role": "assistant", "content": answer.text})
        write_json(file, {"settings": settings, "histories": histories})
    return histories


def behind(llm: LLM, history: Messages, question: str, length: int) -> list[int]:
    """A question behind as many first turns of a conversation as fit into `length` tokens."""
    turns = range(len(history), -1, -2)
    prompts = (ids(llm, history[:turn], question) for turn in turns)
    return next(prompt for prompt in prompts if len(prompt) <= length)


def measure(llm: LLM, cell: Cell, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """One row."""
    params = SamplingParams(max_tokens=max_tokens)
    answers = decode(llm, prompts, params, f"{cell.length} tokens, {cell.method}")
    total = sum((answer.stats for answer in answers), Stats())
    return {
        **cell._asdict(),
        "context_tokens": round(mean(map(len, prompts))),
        "acceptance_length": round(total.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in total.accepted_per_position],
        "by_prompt": [round(answer.stats.acceptance_length, 4) for answer in answers],
        "rounds": total.rounds,
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        **environment(),
    }


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    low, high = min(row["by_prompt"]), max(row["by_prompt"])
    shares = " ".join(f"{share:.3f}" for share in row["accepted_per_position"])
    head = f"{row['context_tokens']:5} tokens  {row['method']:7}  AL {row['acceptance_length']:.3f}"
    print(f"{head}  prompts {low:.2f} … {high:.2f}  per position {shares}", flush=True)


def plot(rows: list[dict[str, Any]], output: Path) -> None:
    """Acceptance length against context, a line a head; small dots are prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for method in sorted({row["method"] for row in rows}):
        line = sorted((r for r in rows if r["method"] == method), key=lambda r: r["length"])
        at = [row["context_tokens"] for row in line]
        (drawn,) = axes.plot(at, [row["acceptance_length"] for row in line], "o-", label=method)
        for tokens, row in zip(at, line, strict=True):
            dots = [tokens] * len(row["by_prompt"])
            axes.plot(dots, row["by_prompt"], ".", color=drawn.get_color(), alpha=0.3)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["length"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="tokens of the prompt", ylabel="acceptance length", ylim=(1, None))
    axes.set_title(f"{TARGET}, HumanEval behind earlier turns, K = {rows[0]['settings']['k']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=150)


def run(args: argparse.Namespace) -> None:
    """Measure the cells that are missing."""
    folders, rows = heads(args), dict[Cell, dict[str, Any]]()
    if args.output.is_file():
        done = json.loads(args.output.read_text())["rows"]
        rows = {Cell(row["length"], row["method"]): row for row in done}
    llm = load(args.dtype, BATCH)
    measured, others = asked(llm, args)
    histories = conversations(llm, others, args)
    for length in args.lengths:
        pairs = zip(histories, measured, strict=True)
        prompts = [behind(llm, history, question, length) for history, question in pairs]
        for cell in (Cell(length, method) for method in folders):
            wanted = {"target": TARGET, "head": fingerprint(folders[cell.method]), "k": args.k,
                      "prompts": len(prompts), "max_tokens": args.max_tokens, "temperature": 0,
                      "dtype": args.dtype, "history_tokens": args.history_tokens}  # fmt: skip
            if cell not in rows or rows[cell]["settings"] != wanted:
                used = llm.use(folders[cell.method], args.k)
                rows[cell] = {**measure(used, cell, prompts, args.max_tokens), "settings": wanted}
                write_json(args.output, {"rows": list(rows.values())})
            show(rows[cell])
    plot(list(rows.values()), args.output.with_suffix(".png"))


def main() -> None:
    parser = options(__doc__, "context_length.json")
    parser.add_argument("--lengths", type=whole_numbers, default=[256, 512, 1024, 2048, 4096],
                        help="most tokens of a prompt")  # fmt: skip
    parser.add_argument("--k", type=int, default=7, help="draft tokens a round")
    parser.add_argument("--prompts", type=int, default=8, help="questions measured at each length")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer measured")
    parser.add_argument("--history-tokens", type=int, default=160, help="longest earlier answer")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
