"""Every benchmark that people quote, one after another: `make bench`.

    python benchmarks/suite.py [--mt-bench FILE] [--vllm-python PYTHON] [--device cuda] [--short]

On a CPU: all methods × K × concurrency on 12 HumanEval prompts × 64 tokens, with this engine and
with vLLM's servers; trees, lookup and chains on all of HumanEval and MT-Bench, on edits and under
load; where a round's time goes; what a draft costs; every family of targets. On CUDA a real shape
with random weights, too. Writes benchmarks/results/ and the tables of docs/benchmarks.md;
`--short` proves only that all of it works, and writes nothing but to --output.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common import RESULTS, TARGET

HERE = Path(__file__).resolve().parent
PEAGLE = [sys.executable, "-m", "peagle"]


class Step(NamedTuple):
    """One command, or why it is left out."""

    name: str  # of its result, without .json
    command: list[str]
    missing: str | None = None


class Sizes(NamedTuple):
    """How much of everything, as options."""

    grid: str  # of the table by K and load
    shape: str  # of the shape with random weights
    trees: str = ""
    profile: str = ""
    costs: str = ""
    families: str = ""


FULL = Sizes(
    grid="--k 1,3,5,7 --concurrency 1,2,4,8 --limit 12 --max-tokens 64",
    shape="--k 3,5,7 --concurrency 1,2,4,8,16,32,64 --max-tokens 256",
)
SHORT = Sizes(
    grid="--k 3 --concurrency 2 --limit 2 --max-tokens 4",
    trees="--limit 2 --max-tokens 4 --repeats 2 --concurrency 1,2",
    profile="--limit 1 --max-tokens 8",
    shape="--k 3 --concurrency 1 --limit 1 --max-tokens 8",
    costs="--repeats 2",
    families="--families gpt_oss",
)


def steps(args: argparse.Namespace) -> list[Step]:
    """What is run, in order."""
    sizes = SHORT if args.short else FULL
    no_vllm = None if args.vllm_python else "no interpreter has vLLM: name it with --vllm-python"
    no_vllm = "it takes minutes to compile, and a test does it" if args.short else no_vllm
    python = ["--vllm-python", str(args.vllm_python)] if args.vllm_python else []
    mt_bench = ["--mt-bench", str(args.mt_bench)] if args.mt_bench else []

    def bench(what: str, *options: str) -> list[str]:
        words = [word for option in (what, "--repeats 1", *options) for word in option.split()]
        return [*PEAGLE, "bench", *words]

    def script(name: str, options: str) -> list[str]:
        return [sys.executable, str(HERE / name), *options.split()]

    device, fixed = f"--device {args.device}", "--ignore-eos"
    vllm = bench(TARGET, sizes.grid, fixed, "--engine vllm")
    found = [
        Step("bench", bench(TARGET, sizes.grid, fixed, device)),
        Step("bench-vllm", [*vllm, *python], no_vllm),
        Step("trees", [*script("trees.py", sizes.trees), *mt_bench]),
        Step("round_profile", script("round_profile.py", sizes.profile)),
        Step("draft_cost", script("draft_cost.py", sizes.costs)),
        Step("families", [*script("families.py", sizes.families), *python]),
    ]
    if args.device.startswith("cuda"):
        shape = script("random_weights.py", f"openai/gpt-oss-20b {sizes.shape} {device}")
        found.append(Step("bench-gpt-oss-20b", shape))
    return found


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
