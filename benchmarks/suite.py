"""Every benchmark that people quote, one after another: `make bench`.

    python benchmarks/suite.py [--mt-bench FILE] [--vllm-python PYTHON] [--device cuda] [--short]

On a CPU, about an hour: all methods × K × concurrency on 12 HumanEval prompts × 64 tokens, with
this engine and with vLLM's servers; all of HumanEval and MT-Bench, one request at a time, at the
catalog's K; what a draft costs; every family of targets. On CUDA the synthetic sweep of a real
shape, too. Writes benchmarks/results/ and the tables of docs/benchmarks.md; `--short` proves only
that all of it works, and writes nothing but to --output.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common import RESULTS, TARGET

from peagle.catalog import find_entry

HERE = Path(__file__).resolve().parent
PEAGLE = [sys.executable, "-m", "peagle"]


class Step(NamedTuple):
    """One command, or why it is left out."""

    name: str  # of its result, without .json
    command: list[str]
    missing: str | None = None


def steps(args: argparse.Namespace) -> list[Step]:
    """What is run, in order."""
    device = ["--device", args.device]
    vllm, mt_bench = args.vllm_python, args.mt_bench
    no_vllm = None if vllm else "no interpreter with vLLM: name one with --vllm-python"
    no_mt = None if mt_bench else "MT-Bench is no part of this project: MT_BENCH=FILE, one line a "
    "question, or a hub id"
    if args.short:
        grid = ["--k", "3", "--concurrency", "2", "--limit", "2", "--max-tokens", "4"]
        whole, families, costs = (
            ["--limit", "2", "--max-tokens", "4"],
            ["llama"],
            ["--repeats", "2"],
        )
        shapes = ["--k", "3", "--concurrency", "1", "--limit", "1", "--max-tokens", "8"]
    else:
        grid = ["--k", "1,3,5,7", "--concurrency", "1,2,4,8", "--limit", "12", "--max-tokens", "64"]
        whole, families, costs = ["--max-tokens", "64"], [], []
        shapes = ["--k", "3,5,7", "--concurrency", "1,2,4,8,16,32,64", "--max-tokens", "256"]
    once, fixed = ["--repeats", "1"], "--ignore-eos"
    families = ["--families", *families] if families else []
    families += ["--vllm-python", str(vllm)] if vllm else []
    run = [*PEAGLE, "bench"]
    found = [
        Step("bench", [*run, TARGET, *grid, *once, fixed, *device]),
        Step("bench-vllm", [*run, TARGET, *grid, *once, fixed, "--engine", "vllm",
                            "--vllm-python", str(vllm)], no_vllm),
        Step("bench-humaneval", [*run, TARGET, "--k", best_k(), *whole, *once, *device]),
        Step("bench-mt-bench", [*run, TARGET, "--k", best_k(), *whole, *once, *device,
                                "--dataset", str(mt_bench)], no_mt),
        Step("draft_cost", [sys.executable, str(HERE / "draft_cost.py"), *costs]),
        Step("families", [sys.executable, str(HERE / "families.py"), *families]),
    ]  # fmt: skip
    if args.device.startswith("cuda"):
        shape = "openai/gpt-oss-20b"
        found.append(Step("bench-gpt-oss-20b", [*run, shape, "--random-weights", *shapes, *once,
                                                *device]))  # fmt: skip
    return found


def best_k() -> str:
    """The K that the catalog's heads are used with."""
    return ",".join(map(str, sorted({head.k for head in find_entry(TARGET).heads.values()})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mt-bench", default=os.environ.get("MT_BENCH"), metavar="FILE")
    parser.add_argument("--vllm-python", default=os.environ.get("PEAGLE_VLLM_PYTHON"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--short", action="store_true", help="a few tokens of everything")
    parser.add_argument("--only", help="one step, by its result's name")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if args.short and args.output == RESULTS:
        parser.error("--short writes no results that mean anything: name another --output")
    for step in steps(args):
        if args.only not in (None, step.name):
            continue
        if step.missing:
            print(f"--- {step.name}: left out: {step.missing}", flush=True)
            continue
        print(f"--- {step.name}", flush=True)
        started = time.monotonic()
        output = args.output / f"{step.name}.json"
        done = subprocess.run([*step.command, "--output", str(output)], check=False)
        if done.returncode:
            sys.exit(f"{step.name} ended with code {done.returncode}")
        print(f"--- {step.name}: {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    if not args.short:
        subprocess.run([sys.executable, str(HERE / "docs_tables.py")], check=True)


if __name__ == "__main__":
    main()
