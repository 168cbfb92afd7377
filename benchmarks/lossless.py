"""The output with each head, in chains and in trees with lookup, against the target alone.

    python benchmarks/lossless.py [--only float32 float32-sampled exact exact-sampled] [--limit N]

All HumanEval prompts, in float32 and ("exact") in bf16 with the batch-invariant mode. Greedy, and
sampled with a seed for each prompt. One prompt at a time, and in batches. Outputs are compared with
those of the target alone, one prompt at a time. Only in greedy float32 may the first difference be
a tie (`differences`).

Each row is written at once. A second call keeps rows of the same settings, heads and machine. The
exit code is 1 if an output differs and it is no permitted tie.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    METHODS,
    PROBLEMS,
    TARGET,
    as_ids,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    whole_numbers,
)

from peagle.bench.run import write_json
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.model.attention import CausalAttend
from peagle.model.loader import load_target
from peagle.model.target import Target

TEMPERATURE = 0.8  # of sampled parts
SAMPLED_NODES = 16  # size of trees in sampled parts
Ids = list[list[int]]
# A gap between the target's two best logits below this is rounding.
TIES = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}


class Part(NamedTuple):
    """Decoding settings of the target."""

    dtype: str
    exact: bool  # the batch-invariant mode
    temperature: float

    def params(self, count: int, max_tokens: int) -> list[SamplingParams]:
        """Sampling parameters of `count` prompts, each with a seed of its own."""
        return [
            SamplingParams(temperature=self.temperature, seed=seed, max_tokens=max_tokens)
            for seed in range(count)
        ]

    @property
    def ties(self) -> bool:
        """Whether a difference by rounding is permitted."""
        return not self.exact and not self.temperature


PARTS = {
    "float32": Part("float32", exact=False, temperature=0.0),
    "float32-sampled": Part("float32", exact=False, temperature=TEMPERATURE),
    "exact": Part("bfloat16", exact=True, temperature=0.0),
    "exact-sampled": Part("bfloat16", exact=True, temperature=TEMPERATURE),
}


class Way(NamedTuple):
    """Drafting method and size, and the number of prompts decoded together.

    Nothing is drafted if both k and nodes are 0.
    """

    method: str = "none"
    k: int = 0  # of a chain
    nodes: int = 0  # of a tree with lookup
    batch: int = 1

    def of(self, llm: LLM, folders: dict[str, Path]) -> LLM:
        """The LLM that decodes this way."""
        tree = {"nodes": self.nodes, "lookup": True} if self.nodes else {"lookup": False}
        chain = {"k": self.k} if self.k else {}
        return llm.use(folders.get(self.method), **tree, **chain, max_batch=self.batch)

    def __str__(self) -> str:
        size = f", {self.nodes} nodes + lookup" if self.nodes else f", K = {self.k}"
        return f"{self.method}{size if self.method != 'none' else ''}, {self.batch} at a time"


def ways(part: Part, args: argparse.Namespace) -> Iterator[Way]:
    """The ways of decoding that are compared with the target alone."""
    for batch in args.batch:
        if batch > 1:
            yield Way(batch=batch)
        for method in METHODS:
            yield Way(method, k=args.k, batch=batch)
            for nodes in [SAMPLED_NODES] if part.temperature else args.nodes:
                yield Way(method, nodes=nodes, batch=batch)


class Difference(NamedTuple):
    """The first difference of one prompt."""

    prompt: int
    position: int  # in the output
    tokens: tuple[int | None, int | None]  # expected, found; None: had ended
    gap: float  # between the target's own two best logits at this position
    tie: bool  # the gap is rounding, and the tokens are those two


def differences(target: Target, prompts: Ids, expected: Ids, found: Ids) -> list[Difference]:
    """Find the first differences of outputs `found` from `expected`, judged by `target`."""
    pairs = enumerate(zip(prompts, expected, found, strict=True))
    return [_judge(target, i, prompt, a, b) for i, (prompt, a, b) in pairs if a != b]


def _judge(
    target: Target, index: int, prompt: list[int], expected: list[int], found: list[int]
) -> Difference:
    shared = zip(expected, found, strict=False)
    length = min(len(expected), len(found))
    position = next((at for at, (a, b) in enumerate(shared) if a != b), length)
    tokens = tuple(ids[position] if position < len(ids) else None for ids in (expected, found))
    best, gap = _two_best(target, prompt + expected[:position])
    tie = gap < TIES[target.dtype] and set(tokens) == best
    return Difference(index, position, tokens, gap, tie)  # type: ignore[arg-type]


@torch.no_grad()
def _two_best(target: Target, ids: list[int]) -> tuple[set[int], float]:
    """The two likeliest next tokens, and the gap between their logits."""
    packed = torch.tensor(ids, device=target.device)
    at = torch.arange(len(ids), device=target.device)
    hidden = target.forward(packed, at, CausalAttend()).hidden
    top = target.logits(hidden[-1:])[0].float().topk(2)
    return set(top.indices.tolist()), float(top.values[0] - top.values[1])


def compare(llm: LLM, prompts: Ids, expected: Ids, params: list[SamplingParams]) -> dict[str, Any]:
    """Decode the prompts and compare the outputs with the expected ones."""
    started = time.perf_counter()
    answers = llm.generate(prompts, params)
    stats = sum((answer.stats for answer in answers), Stats())
    ids = [answer.token_ids for answer in answers]
    target: Any = llm.target
    if ids != expected and not target.runs:  # native code runs it: it has no logits of its own
        target = load_target(target.name, dtype=str(target.dtype).removeprefix("torch."))
    found = differences(target, prompts, expected, ids)
    return {
        "prompts": len(prompts),
        "output_tokens": sum(map(len, expected)),
        "identical": len(prompts) - len(found),
        "ties": sum(difference.tie for difference in found),
        "differences": [difference._asdict() for difference in found],
        "acceptance_length": round(stats.acceptance_length, 4),
        "accepted_from_lookup": stats.accepted_from_lookup,
        "seconds": round(time.perf_counter() - started, 1),
    }


def wrong(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The differences that are no permitted ties."""
    ties = PARTS[row["part"]].ties
    return [one for one in row["differences"] if not (one["tie"] and ties)]


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    way = Way(row["method"], row["k"], row["nodes"], row["batch"])
    print(f"{row['part']}: {way}: {row['identical']} of {row['prompts']} prompts identical, "
          f"{row['ties']} ties, AL {row['acceptance_length']}", flush=True)  # fmt: skip
    for d in row["differences"]:
        kind = "DIFFERENT" if d in wrong(row) else "tie"
        where = f"prompt {d['prompt']} token {d['position']}"
        print(f"  {where}: {d['tokens']} gap {d['gap']:.2e} {kind}")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the missing rows; write each at once."""
    folders = heads(args)
    settings = {
        "target": TARGET,
        "heads": {method: fingerprint(folder) for method, folder in folders.items()},
        "dataset": "HumanEval",
        "prompts": args.limit,
        "max_tokens": args.max_tokens,
    }
    about = {**environment(), "settings": settings}
    before = json.loads(args.output.read_text()) if args.output.is_file() else {}
    rows = before["rows"] if all(before.get(name) == about[name] for name in about) else []
    known = {(row["part"], row["method"], row["k"], row["nodes"], row["batch"]) for row in rows}
    for name in args.only:
        part = PARTS[name]
        missing = [way for way in ways(part, args) if (name, *way) not in known]
        if not missing:
            continue
        llm = load(part.dtype, deterministic=part.exact)
        prompts = as_ids(llm, human_eval(args.limit))
        params = part.params(len(prompts), args.max_tokens)
        alone = Way().of(llm, folders).generate(prompts, params)
        expected = [answer.token_ids for answer in alone]
        for way in missing:
            found = compare(way.of(llm, folders), prompts, expected, params)
            rows.append({"part": name, **part._asdict(), **way._asdict(), **found})
            write_json(args.output, {**about, "rows": rows})
            show(rows[-1])
    return rows


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = options(__doc__, "lossless.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    parser.add_argument("--limit", type=int, default=PROBLEMS, help="first N problems")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--k", type=int, default=7, help="draft tokens of chains")
    parser.add_argument("--nodes", type=whole_numbers, default=[4, 16, 40], help="of trees")
    parser.add_argument("--batch", type=whole_numbers, default=[1, 8], help="decoded together")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(any(wrong(row) for row in measure(parse())))
