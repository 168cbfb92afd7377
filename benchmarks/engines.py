"""Ways to decode the demo target on this machine's CPU, side by side.

    python benchmarks/engines.py --vllm-python .venv-vllm/bin/python --llama-python PYTHON

This engine with bf16, int8 and int4 weights, alone and with both heads; transformers; vLLM with the
same heads; llama.cpp on the GGUF file that the target comes from (PYTHON has llama-cpp-python).
HumanEval prompts through the chat template, greedy, EOS ignored: all get the same token ids and
give as many back. Prompt processing is timed, loading and warm-up are not. No prompt is found in a
cache of an earlier repeat. All ways take turns within a repeat, the order rotates from repeat to
repeat, and a ratio is the median of the repeats' own ratios. `same` counts answers with the token
ids of our target alone: bf16 and quantised weights part at near ties. Acceptance length of
transformers: tokens a forward.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tables
import torch
from common import (
    METHODS,
    TARGET,
    as_ids,
    catalog_k,
    environment,
    fingerprint,
    heads,
    human_eval,
    load,
    options,
    whole_numbers,
    write_json,
)
from peers import (
    CONTEXT,
    Decode,
    Decoded,
    PeerFailure,
    Prompts,
    gguf_file,
    llama_peer,
    transformers_decoder,
    vllm_peer,
)

from peagle.catalog import PARALLEL_METHODS, speculative_config
from peagle.cli.common import progress_bar
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.methods.load import load_drafter
from peagle.methods.save import save_drafter
from peagle.model.drafter import Drafter
from peagle.model.loader import locate

WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}  # quantize of our targets
LOOKUP = 3  # tokens transformers drafts from the prompt
WARM = 32  # tokens of the warm-up: adaptive depths have seen something by then


@dataclass(slots=True)
class Row:
    """One way to decode at one concurrency."""

    engine: str
    method: str
    k: int | str  # draft tokens a round
    weights: str
    concurrency: int
    decode: Decode
    results: list[Decoded] = field(default_factory=list)  # of the repeats

    def __str__(self) -> str:
        k = f" K = {self.k}" if self.k else ""
        return f"{self.engine} {self.weights} {self.method}{k}"

    @property
    def speeds(self) -> list[float]:
        """Output tokens a second, of each repeat."""
        return [sum(map(len, result.token_ids)) / result.seconds for result in self.results]

    def report(self, base: "Row") -> dict[str, Any]:
        """The row as the JSON file has it."""
        pairs = zip(self.results[0].token_ids, base.results[0].token_ids, strict=True)
        return {
            "engine": self.engine,
            "method": self.method,
            "k": self.k,
            "weights": self.weights,
            "concurrency": self.concurrency,
            "ratio": round(ratio(self, base), 3),
            "tokens_per_second": round(median(self.speeds), 2),
            "least": round(min(self.speeds), 2),
            "most": round(max(self.speeds), 2),
            "acceptance_length": round(median(r.acceptance_length for r in self.results), 3),
            "same": sum(mine == theirs for mine, theirs in pairs),
        }


def ratio(row: Row, base: Row) -> float:
    """Times the speed of another row."""
    return median(a / b for a, b in zip(row.speeds, base.speeds, strict=True))


def our_decoder(
    llm: LLM, drafter: Drafter | None, k: int | None, concurrency: int, warm_up: list[int]
) -> Decode:
    """This engine; a new one each time, which has nothing in its cache. `warm_up` shares no
    beginning with what is measured."""

    def decode(prompts: Prompts, max_tokens: int) -> Decoded:
        used = llm.use(drafter, k, lookup=False, max_batch=concurrency)
        used.generate([warm_up], SamplingParams(max_tokens=WARM, ignore_eos=True))
        started = time.perf_counter()
        answers = used.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        seconds = time.perf_counter() - started
        stats = sum((answer.stats for answer in answers), Stats())
        return Decoded([a.token_ids for a in answers], seconds, stats.acceptance_length)

    return decode


def our_rows(llm: LLM, weights: str, args: argparse.Namespace, warm_up: list[int]) -> list[Row]:
    """Pinned best K, and what pays; with more than one request at a time bf16 alone."""
    drafters = {m: llm.load_head(folder) for m, folder in heads(args).items()}
    rows = []
    for concurrency in args.concurrency if weights == "bf16" else [1]:
        ways: list[tuple[str, int | None]] = [("none", None)]
        for method in METHODS:
            ways.append((method, None))
            if concurrency == 1 or method == "p-eagle":
                ways.append((method, args.k[method]))
        for method, k in ways:
            drafter = drafters.get(method)
            shown = 0 if drafter is None else k or "adaptive"
            decode = our_decoder(llm, drafter, k, concurrency, warm_up)
            rows.append(Row("peagle", method, shown, weights, concurrency, decode))
    return rows


def transformers_rows() -> list[Row]:
    """Plain, and with drafts looked up in the prompt."""
    decode = transformers_decoder(torch.bfloat16)
    look_up = transformers_decoder(torch.bfloat16, LOOKUP)
    return [
        Row("transformers", "none", 0, "bf16", 1, decode),
        Row("transformers", "prompt lookup", LOOKUP, "bf16", 1, look_up),
    ]


def vllm_rows(
    python: str, args: argparse.Namespace, folder: Path, warm_up: list[int]
) -> tuple[list[Row], dict[str, Any]]:
    """vLLM's rows, and its versions and settings; one process a method."""
    rows, known = list[Row](), dict[str, Any]()
    for method, k in {"none": 0, **args.k}.items():
        start = {
            "model": locate(TARGET)[0],
            "dtype": "bfloat16",
            "max_num_seqs": max(args.concurrency),
            "max_model_len": CONTEXT,
            "enforce_eager": False,
            "enable_prefix_caching": True,
        }
        parallel = method in PARALLEL_METHODS
        if k:
            start["speculative_config"] = speculative_config(parallel, str(folder / method), k)
        peer = vllm_peer(python, args.threads)
        request = {"start": start, "ignore_eos": True}
        answer = peer.ask({**request, "prompts": [warm_up], "max_tokens": WARM})
        # Where the head lies for now says nothing.
        drafts = speculative_config(parallel, method, k) if k else None
        known[method] = {**answer["versions"], **start, "speculative_config": drafts}
        for concurrency in args.concurrency:
            if concurrency == 1 or method != "eagle3":
                decode = peer.decoder({**request, "concurrency": concurrency})
                rows.append(Row("vllm", method, k, "bf16", concurrency, decode))
    return rows, known


def llama_rows(
    python: str, args: argparse.Namespace, warm_up: list[int]
) -> tuple[list[Row], dict[str, Any]]:
    """llama.cpp's row, and its versions."""
    threads = args.threads
    start = {"model_path": str(gguf_file()), "n_ctx": CONTEXT, "n_threads": threads}
    request = {"start": {**start, "n_threads_batch": threads}}
    peer = llama_peer(python, threads)
    answer = peer.ask({**request, "prompts": [warm_up], "max_tokens": WARM})
    return [Row("llama.cpp", "none", 0, "Q4_1", 1, peer.decoder(request))], answer["versions"]


def measure(rows: list[Row], prompts: Prompts, max_tokens: int, repeats: int) -> None:
    """Decode with all rows in turn, repeat by repeat."""
    with progress_bar(f"c = {rows[0].concurrency}") as bar:
        task = bar.add_task("", total=repeats * len(rows))
        for repeat in range(repeats):
            turn = repeat * len(rows) // repeats
            for row in rows[turn:] + rows[:turn]:
                decoded = row.decode(prompts, max_tokens)
                if any(len(answer) != max_tokens for answer in decoded.token_ids):
                    sys.exit(f"{row}: not every answer has {max_tokens} tokens: unequal work")
                row.results.append(decoded)
                bar.advance(task)


def goals(rows: list[Row]) -> list[dict[str, Any]]:
    """The goals, the measured ratios, and whether each is met; None if a row was left out."""

    def best(engine: str, *methods: str, weights: str = "bf16") -> Row | None:
        """The fastest of some rows at c = 1."""
        found = [
            r for r in rows if r.concurrency == 1 and (r.engine, r.weights) == (engine, weights)
        ]
        found = [r for r in found if r.method in methods]
        return max(found, key=lambda r: median(r.speeds), default=None)

    none = best("peagle", "none")
    aims = [
        ("P-EAGLE : the target alone", best("peagle", "p-eagle"), none, 2.0),
        ("P-EAGLE : vLLM's P-EAGLE", best("peagle", "p-eagle"), best("vllm", "p-eagle"), 1.3),
        ("the target alone : transformers", none, best("transformers", "none"), 1.4),
        ("int4, alone or P-EAGLE : llama.cpp",
         best("peagle", "none", "p-eagle", weights="int4"),
         best("llama.cpp", "none", weights="Q4_1"), 1.0),
    ]  # fmt: skip
    for row in rows:
        if (row.method, row.weights, row.k) == ("p-eagle", "bf16", "adaptive"):
            aim = f"P-EAGLE adaptive : the target alone, c = {row.concurrency}"
            aims.append((aim, row, base_of(row, rows), 0.98))
    return [
        {
            "goal": aim,
            "wanted": wanted,
            "ratio": round(ratio(a, b), 3) if a and b else None,
            "met": ratio(a, b) >= wanted if a and b else None,
        }
        for aim, a, b, wanted in aims
    ]


def base_of(row: Row, rows: list[Row]) -> Row:
    """Our target alone, in bf16, at the row's concurrency."""
    wanted = ("peagle", "none", "bf16", row.concurrency)
    return next(r for r in rows if (r.engine, r.method, r.weights, r.concurrency) == wanted)


def peer_rows(
    args: argparse.Namespace, folder: Path, warm_up: list[int]
) -> tuple[list[Row], dict[str, Any], dict[str, str]]:
    """The rows of vLLM and llama.cpp, what is known of these, and why one is left out."""
    peers = {
        "vllm": (args.vllm_python, lambda python: vllm_rows(python, args, folder, warm_up)),
        "llama.cpp": (args.llama_python, lambda python: llama_rows(python, args, warm_up)),
    }
    rows, known, left_out = list[Row](), dict[str, Any](), dict[str, str]()
    for name, (python, start) in peers.items():
        try:
            if not python:
                raise PeerFailure("no interpreter is named that has it")
            more, known[name] = start(python)
            rows += more
        except (PeerFailure, OSError) as reason:
            left_out[name] = str(reason)
            print(f"left out: {name}: {reason}", flush=True)
    return rows, known, left_out


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The report; `folder` takes exported heads."""
    llms = {weights: load("bfloat16", quantize=kind) for weights, kind in WEIGHTS.items()}
    llm, folders, questions = llms["bf16"], heads(args), human_eval()
    prompts = as_ids(llm, questions[: max(args.prompts)])
    # Without the template that the others begin with.
    warm_up = list(llm.tokenizer(questions[-1])["input_ids"])
    rows = [row for weights in llms for row in our_rows(llms[weights], weights, args, warm_up)]
    rows += transformers_rows()
    for method, head in folders.items():
        save_drafter(load_drafter(head, llm.target), folder / method, "vllm")
    more, known, left_out = peer_rows(args, folder, warm_up)
    rows += more
    for concurrency in args.concurrency:
        several = concurrency > 1
        mine = [row for row in rows if row.concurrency == concurrency]
        some = prompts[: args.prompts[several]]
        measure(mine, some, args.max_tokens[several], args.repeats[several])
    rows = [row for row in rows if row.results]
    settings = {
        "target": TARGET,
        "heads": {method: fingerprint(head) for method, head in folders.items()},
        "dataset": "HumanEval",
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "threads": args.threads,
        "temperature": 0,
        "ignore_eos": True,
        "prompt_lookup_num_tokens": LOOKUP,
    }
    return {
        **environment(),
        "settings": settings,
        "peers": known,
        "left_out": left_out,
        "goals": goals(rows),
        "rows": [row.report(base_of(row, rows)) for row in rows],
    }


def main() -> None:
    parser = options(__doc__, "engines.json")
    parser.add_argument("--vllm-python", default=os.environ.get("PEAGLE_VLLM_PYTHON"),
                        metavar="PYTHON", help="has vLLM")  # fmt: skip
    parser.add_argument("--llama-python", metavar="PYTHON", help="has llama-cpp-python")
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 4, 8, 16])
    parser.add_argument("--prompts", type=whole_numbers, default=[12, 32], help="c = 1, above")
    parser.add_argument("--max-tokens", type=whole_numbers, default=[64, 48], help="c = 1, above")
    parser.add_argument("--repeats", type=whole_numbers, default=[3, 9], help="c = 1, above")
    parser.add_argument("--threads", type=int, default=2, help="of everybody")
    args = parser.parse_args()
    args.k = catalog_k()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        report = run(args, Path(folder))
    print("\n".join(tables.engines(report)))
    write_json(args.output, report)


if __name__ == "__main__":
    main()
