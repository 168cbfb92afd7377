"""P-EAGLE's trees and lookup compared with chains, EAGLE-3 and the target alone.

    python benchmarks/trees.py --mt-bench FILE [--only humaneval mt-bench edits load] [--resume]

bf16, greedy. Four parts: HumanEval and MT-Bench in full, one request at a time; 20 files in which
a variable is to be renamed (edits.txt); HumanEval prompts at several loads, EOS ignored. All ways
answer a prompt, in rotating order, before the next prompt begins. Each way has its own engine, so
no prompt is in a cache. In the first three parts a speed-up is the ratio of tokens per second over
all answers; its 95 % interval is a bootstrap over conversations, paired between the ways. Under
load it is the median of the ratios of the repeats, each with other prompts, and a bootstrap over
repeats.

After each prompt all measured turns are written to a .jsonl file next to the output. --resume
continues from that file.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, NamedTuple

import numpy as np
import tables
from common import (
    TARGET,
    Journal,
    Plays,
    catalog_k,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    whole_numbers,
)

from peagle.bench import run
from peagle.bench.native import WARM_UP, Conversations, Player
from peagle.bench.summary import DRAWS, Cell, Played, Result, compared, joined, row
from peagle.bench.workload import read_workload
from peagle.catalog import HEADLESS
from peagle.cli.common import progress_bar
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams

ALONE, DEFAULT = "alone", "P-EAGLE"
NODES = 12  # size of the pinned tree, one request at a time
LOAD_NODES = (4, 8, 12)  # sizes of pinned trees under load
BASES = (ALONE, "EAGLE-3 chain", "EAGLE-3 + lookup")  # denominators of speed-ups
LOAD_PROMPTS = 16  # of each repeat at a load
LOAD_KV_TOKENS = 1024  # KV cache per request under load
WARM_TOKENS = 32  # of the warm-up, so that the budget has observed some rounds
PARTS = ("humaneval", "mt-bench", "edits", "load")
FUNCTIONS_OF_A_FILE = 4  # between its first and its last part
ASK = (
    "Rename the variable `{old}` to `{new}` everywhere in this file. Change nothing else, and "
    "answer with the whole file.\n```python\n{file}```"
)


# Names in the templates: a record, the variable that is renamed, its new name, and three fields.
NAMES = ("one", "many", "new", "text", "number", "group")
TABLE, HEAD, *FUNCTIONS, LAST = Path(__file__).with_name("edits.txt").read_text().split("----\n")
WORDS = [dict(zip(NAMES, line.split(), strict=True)) for line in TABLE.splitlines()]


def edited_files() -> list[str]:
    """The files, one for each of WORDS."""
    choose = random.Random(24)
    made = []
    for words in WORDS:
        parts = [HEAD, *choose.sample(FUNCTIONS, FUNCTIONS_OF_A_FILE), LAST]
        filled = Template("\n\n".join(parts))
        made.append(filled.substitute(words, Record=words["one"].title()))
    return made


def edits() -> list[str]:
    """The prompts: one for each file."""
    pairs = zip(WORDS, edited_files(), strict=True)
    return [ASK.format(old=words["many"], new=words["new"], file=file) for words, file in pairs]


def chain(method: str, concurrency: int = 1) -> Cell:
    """A chain of the catalog's K."""
    return Cell(Drafting(method, catalog_k()[method]), concurrency, 0.0)


def tree(nodes: int, concurrency: int = 1, *, lookup: bool = True) -> Cell:
    """A pinned tree of P-EAGLE."""
    return Cell(Drafting("p-eagle", None, nodes, lookup), concurrency, 0.0)


def adaptive(method: str, concurrency: int = 1, *, lookup: bool = True) -> Cell:
    """Draft sizes chosen by the budget."""
    return Cell(Drafting(method, None, lookup=lookup), concurrency, 0.0)


def one_at_a_time() -> dict[str, Cell]:
    """The ways that are compared at c = 1."""
    return {
        ALONE: Cell(Drafting(), 1, 0.0),
        "EAGLE-3 chain": chain("eagle3"),
        "EAGLE-3 + lookup": adaptive("eagle3"),
        "P-EAGLE chain": chain("p-eagle"),
        "P-EAGLE tree": tree(NODES, lookup=False),
        "P-EAGLE tree + lookup": tree(NODES),
        DEFAULT: adaptive("p-eagle"),
        "lookup": adaptive("lookup"),
    }


def for_edits() -> dict[str, Cell]:
    """The ways for edits: adaptive, with and without lookup."""
    kept = (ALONE, "EAGLE-3 + lookup", DEFAULT, "lookup")
    ways = {name: way for name, way in one_at_a_time().items() if name in kept}
    return ways | {"P-EAGLE, no lookup": adaptive("p-eagle", lookup=False)}


def under_load(concurrency: int) -> dict[str, Cell]:
    """The default, and pinned sizes, at one load."""
    return {
        ALONE: Cell(Drafting(), concurrency, 0.0),
        DEFAULT: adaptive("p-eagle", concurrency),
        **{f"tree of {n} + lookup": tree(n, concurrency) for n in LOAD_NODES},
        "P-EAGLE chain": chain("p-eagle", concurrency),
    }


class Part(NamedTuple):
    """Conversations, the ways that answer them, and their sampling parameters."""

    name: str
    conversations: Conversations
    ways: dict[str, Cell]
    params: SamplingParams
    together: int = 1  # conversations in one turn of a way

    @property
    def count(self) -> int:
        """Number of turns of every way."""
        return len(self.conversations) // self.together


def load_prompts(args: argparse.Namespace) -> int:
    """Number of prompts of a repeat at a load."""
    return min(LOAD_PROMPTS, args.limit or LOAD_PROMPTS)


def parts(args: argparse.Namespace) -> Iterator[Part]:
    """The parts that the options name."""
    params = SamplingParams(max_tokens=args.max_tokens)
    ways, problems = one_at_a_time(), [[question] for question in human_eval()]
    if "humaneval" in args.only:
        yield Part("humaneval", problems[: args.limit], ways, params)
    if "mt-bench" in args.only and args.mt_bench:
        yield Part("mt-bench", read_workload(args.mt_bench, args.limit).conversations, ways, params)
    if "edits" in args.only:
        whole_file = replace(params, max_tokens=4 * args.max_tokens)
        conversations = [[question] for question in edits()[: args.limit]]
        yield Part("edits", conversations, for_edits(), whole_file)
    if "load" in args.only:
        together = load_prompts(args)
        some = problems[: args.repeats * together]
        half = replace(params, max_tokens=max(1, args.max_tokens // 2), ignore_eos=True)
        for c in args.concurrency:
            yield Part(f"load {c}", some, under_load(c), half, together)


def open_engines(llm: LLM, part: Part, drafters: dict[str, Any]) -> dict[str, LLM]:
    """An engine for each way, warmed up."""
    engines = {}
    for name, cell in part.ways.items():
        most = cell.concurrency
        engines[name] = llm.use(
            drafters[cell.drafting.method],
            **cell.drafting.options,
            max_batch=most,
            kv_tokens=most * LOAD_KV_TOKENS if most > 1 else None,
        )
        hello = WARM_UP * most
        params = SamplingParams(max_tokens=WARM_TOKENS, ignore_eos=True)
        Player(engines[name], params).play(hello, most)
    return engines


def play(part: Part, number: int, engines: dict[str, LLM]) -> Plays:
    """Answer the conversations of turn `number` in every way, in rotating order."""
    first = number * part.together
    conversations = part.conversations[first : first + part.together]
    names, plays = list(engines), Plays()
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
        concurrency = part.ways[name].concurrency
        played = Player(engines[name], part.params).play(conversations, concurrency)
        if played.errors:
            sys.exit(f"{part.name} {number}, {name}: {played.errors[0]}")
        plays[name] = played
    return plays


def fill(part: Part, journal: Journal, llm: LLM, drafters: dict[str, Any]) -> Iterator[None]:
    """Play the turns of a part that the journal lacks. Yields after each one and at the end."""
    missing = [number for number in range(part.count) if number not in journal.of(part.name)]
    engines = open_engines(llm, part, drafters) if missing else {}
    with progress_bar(part.name) as bar:
        for number in bar.track(missing):
            journal.add(part.name, number, play(part, number, engines))
            yield
    yield


def plays_by_way(part: Part, found: dict[int, Plays]) -> dict[str, list[Played]]:
    """Plays by way, in order; conversations are numbered through."""
    numbers = sorted(number for number in found if number < part.count)
    return {
        way: [_numbered(found[number][way], number * part.together) for number in numbers]
        for way in part.ways
    }


def _numbered(played: Played, first: int) -> Played:
    moved = [replace(s, conversation=first + s.conversation) for s in played.samples]
    return played._replace(samples=moved)


def dataset_rows(part: Part, found: dict[int, Plays]) -> list[dict[str, Any]]:
    """A row for each way, as in `peagle bench`; `over`: ratios to the speeds of BASES."""
    played = plays_by_way(part, found)
    results = {way: Result(cell, None, [joined(played[way])]) for way, cell in part.ways.items()}
    rows = []
    for way, own in results.items():
        others = [base for base in BASES if base in results and base != way]
        over = {base: compared(own, results[base]) for base in others}
        ratios = {base: [it["speed_up"], it["speed_up_95"]] for base, it in over.items()}
        rows.append({"way": way, **row(own, results[ALONE]), "over": ratios})
    return rows


def load_rows(part: Part, found: dict[int, Plays]) -> list[dict[str, Any]]:
    """A row for each way at one load; the default is also compared with the best pinned way."""
    played = plays_by_way(part, found)
    results = {way: Result(cell, None, played[way]) for way, cell in part.ways.items()}
    speeds = {way: own.speeds for way, own in results.items()}
    over = {way: paired(own, speeds[ALONE]) for way, own in speeds.items()}
    pinned = [way for way in over if way not in (ALONE, DEFAULT)]
    best = max(pinned, key=lambda way: over[way][0])
    rows = []
    for way, own in results.items():
        ratios = {} if way == ALONE else {ALONE: over[way]}
        if way == DEFAULT:
            ratios[best] = paired(speeds[DEFAULT], speeds[best])
        rows.append({"way": way, **row(own, results[ALONE]), "over": ratios})
    return rows


def paired(speeds: list[float], others: list[float]) -> list[Any]:
    """The median ratio of repeats, and its 95 % interval; None for a single repeat."""
    ratios = [a / b for a, b in zip(speeds, others, strict=True)]
    if len(ratios) < 2:
        return [round(ratios[0], 3), None]
    draws = np.random.default_rng(0).choice(ratios, (DRAWS, len(ratios)))
    edges = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return [round(median(ratios), 3), [round(float(edge), 3) for edge in edges]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and report; the report is written after every prompt."""
    folders = heads(args)
    settings = {
        "target": TARGET,
        "heads": {method: fingerprint(head) for method, head in folders.items()},
        "dtype": "bfloat16",
        "temperature": 0,
        "max_tokens": args.max_tokens,
        "load_prompts": load_prompts(args),
    }
    about = {**environment(), "settings": settings}
    journal = Journal(args.output.with_suffix(".jsonl"), about, resume=args.resume)
    llm = load("bfloat16")
    drafters = {m: llm.load_head(folder) for m, folder in folders.items()}
    drafters |= dict.fromkeys(HEADLESS)
    known = json.loads(args.output.read_text()) if args.resume and args.output.is_file() else {}
    same = all(known.get(name) == about[name] for name in about)
    rows = known["parts"] if same else {}
    report = dict[str, Any]()
    for part in parts(args):
        make_rows = load_rows if part.name.startswith("load") else dataset_rows
        for _ in fill(part, journal, llm, drafters):
            rows[part.name] = make_rows(part, journal.of(part.name))
            report = {**about, "parts": rows}
            run.write_json(args.output, report)
    print(f"written: {args.output}")
    return report


def main() -> None:
    parser = options(__doc__, "trees.json")
    parser.add_argument("--mt-bench", metavar="FILE", help="MT-Bench; left out without it")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts")
    parser.add_argument(
        "--limit", type=int, help="first N conversations of each part; name loads of at most N"
    )
    parser.add_argument("--max-tokens", type=int, default=128,
                        help="longest answer; of edits four times, under load half")  # fmt: skip
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=5, help="of each load")
    parser.add_argument("--resume", action="store_true", help="go on where a run was cut short")
    args = parser.parse_args()
    if "load" in args.only and max(args.concurrency) > load_prompts(args):
        parser.error("--concurrency: more than there are prompts")
    print("\n".join(tables.trees(measure(args))))


if __name__ == "__main__":
    main()
