"""Ways to decode a target on this machine's CPU, side by side.

    python benchmarks/engines.py --vllm-python .venv-vllm/bin/python --llama-python PYTHON
    python benchmarks/engines.py --target FILE.gguf ... --output FILE

The engines: peagle with bf16, int8 and int4 weights, alone and with both heads; transformers; vLLM
with the same heads; llama.cpp on the target's GGUF file (PYTHON has llama-cpp-python). Another
target is measured without heads, alone and with lookup. HumanEval prompts with the chat template,
greedy, EOS ignored: all engines get the same token ids and emit the same number of tokens. Times
include prompt processing, but not loading and warm-up. No prompt is in a cache of an earlier
repeat. All ways take turns within a repeat, in rotating order. A ratio is the median of the ratios
within the repeats. `same` counts answers equal to those of peagle's bf16 target alone: other
weights differ at near ties. The acceptance length of transformers is its number of tokens per
forward.
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

from peagle.catalog import PARALLEL_METHODS
from peagle.cli.common import progress_bar
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.model.drafter import Drafter
from peagle.model.loader import locate
from peagle.vllm.flags import speculative_config

WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}  # `quantize` of peagle's targets
LOOKUP = 3  # draft tokens of transformers' prompt lookup
WARM_TOKENS = 32  # of the warm-up, so that the budget has observed some rounds


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
        """The row of the JSON file."""
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
            "same": sum(own == other for own, other in pairs),
        }


def ratio(row: Row, base: Row) -> float:
    """Speed relative to another row."""
    return median(a / b for a, b in zip(row.speeds, base.speeds, strict=True))


def our_decoder(
    llm: LLM,
    drafter: Drafter | None,
    k: int | None,
    concurrency: int,
    warm_up: list[int],
    *,
    lookup: bool = False,
) -> Decode:
    """A decoder that makes an engine, with an empty cache, for each call. `warm_up` has no common
    prefix with the prompts."""

    def decode(prompts: Prompts, max_tokens: int) -> Decoded:
        used = llm.use(drafter, k, lookup=lookup, max_batch=concurrency)
        used.generate([warm_up], SamplingParams(max_tokens=WARM_TOKENS, ignore_eos=True))
        started = time.perf_counter()
        answers = used.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        seconds = time.perf_counter() - started
        stats = sum((answer.stats for answer in answers), Stats())
        return Decoded([a.token_ids for a in answers], seconds, stats.acceptance_length)

    return decode


def our_rows(llm: LLM, weights: str, args: argparse.Namespace, warm_up: list[int]) -> list[Row]:
    """Rows of peagle: the best K pinned, and adaptive; without heads, lookup. Only bf16 under
    load."""
    drafters = {m: llm.load_head(folder) for m, folder in args.heads.items()}
    rows = []
    for concurrency in args.concurrency if weights == "bf16" else [1]:
        ways: list[tuple[str, int | None]] = [("none", None)]
        if not drafters:
            ways.append(("lookup", None))
        for method in drafters:
            ways.append((method, None))
            if concurrency == 1 or method == "p-eagle":
                ways.append((method, args.k[method]))
        for method, k in ways:
            drafter = drafters.get(method)
            shown = 0 if method == "none" else k or "adaptive"
            look_up = method == "lookup"
            decode = our_decoder(llm, drafter, k, concurrency, warm_up, lookup=look_up)
            rows.append(Row("peagle", method, shown, weights, concurrency, decode))
    return rows


def transformers_rows(target: str) -> list[Row]:
    """Rows of transformers: plain, and with prompt lookup."""
    decode = transformers_decoder(target, torch.bfloat16)
    look_up = transformers_decoder(target, torch.bfloat16, LOOKUP)
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
            "model": locate(args.target)[0],
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
        answer = peer.ask({**request, "prompts": [warm_up], "max_tokens": WARM_TOKENS})
        # Names in place of this machine's folders.
        named = {"model": Path(args.target).name, "speculative_config": None}
        if k:
            named["speculative_config"] = speculative_config(parallel, method, k)
        known[method] = {**answer["versions"], **start, **named}
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
    start = {"model_path": str(gguf_file(args.target)), "n_ctx": CONTEXT, "n_threads": threads}
    request = {"start": {**start, "n_threads_batch": threads}}
    peer = llama_peer(python, threads)
    answer = peer.ask({**request, "prompts": [warm_up], "max_tokens": WARM_TOKENS})
    return [Row("llama.cpp", "none", 0, "GGUF", 1, peer.decoder(request))], answer["versions"]


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


def base_of(row: Row, rows: list[Row]) -> Row:
    """The row of peagle's target alone, in bf16, at the same concurrency."""
    wanted = ("peagle", "none", "bf16", row.concurrency)
    return next(r for r in rows if (r.engine, r.method, r.weights, r.concurrency) == wanted)


def peer_rows(
    args: argparse.Namespace, folder: Path, warm_up: list[int]
) -> tuple[list[Row], dict[str, Any], dict[str, str]]:
    """Rows of vLLM and llama.cpp, their versions and settings, and reasons of those left out."""
    peers = {
        "vllm": (args.vllm_python, lambda python: vllm_rows(python, args, folder, warm_up)),
        "llama.cpp": (args.llama_python, lambda python: llama_rows(python, args, warm_up)),
    }
    rows, known, left_out = list[Row](), dict[str, Any](), dict[str, str]()
    for name, (python, start) in peers.items():
        try:
            if not python:
                raise PeerFailure("no interpreter for it is named")
            more, known[name] = start(python)
            rows += more
        except (PeerFailure, OSError) as reason:
            left_out[name] = str(reason)
            print(f"left out: {name}: {reason}", flush=True)
    return rows, known, left_out


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The report; `folder` takes exported heads."""
    llms = {
        weights: load("bfloat16", target=args.target, quantize=kind)
        for weights, kind in WEIGHTS.items()
    }
    llm, questions = llms["bf16"], human_eval()
    prompts = as_ids(llm, questions[: max(args.prompts)])
    # Without the template, which is the prefix of all other prompts.
    warm_up = list(llm.tokenizer(questions[-1])["input_ids"])
    rows = [row for weights in llms for row in our_rows(llms[weights], weights, args, warm_up)]
    rows += transformers_rows(args.target)
    for method, head in args.heads.items():
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
        "target": Path(args.target).name,
        "heads": {method: fingerprint(head) for method, head in args.heads.items()},
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
        "rows": [row.report(base_of(row, rows)) for row in rows],
    }


def main() -> None:
    parser = options(__doc__, "engines.json")
    parser.add_argument("--target", default=TARGET, help="or a GGUF file")
    parser.add_argument("--vllm-python", default=os.environ.get("PEAGLE_VLLM_PYTHON"),
                        metavar="PYTHON", help="has vLLM")  # fmt: skip
    parser.add_argument("--llama-python", metavar="PYTHON", help="has llama-cpp-python")
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 8, 16])
    parser.add_argument("--prompts", type=whole_numbers, default=[6, 16], help="c = 1, above")
    parser.add_argument("--max-tokens", type=whole_numbers, default=[64, 48], help="c = 1, above")
    parser.add_argument("--repeats", type=whole_numbers, default=[3, 3], help="c = 1, above")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine")
    args = parser.parse_args()
    for name in ("prompts", "max_tokens", "repeats"):
        if len(getattr(args, name)) != 2:
            parser.error(f"--{name}: give two numbers, for c = 1 and above")
    if max(args.concurrency) > args.prompts[1]:
        parser.error("--concurrency: more than there are prompts")
    args.heads = heads(args) if args.target == TARGET else {}
    args.k = {method: catalog_k()[method] for method in args.heads}
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        report = run(args, Path(folder))
    print("\n".join(tables.engines(report)))
    write_json(args.output, report)


if __name__ == "__main__":
    main()
