"""All published benchmarks, one after another: `make bench`.

    python benchmarks/suite.py [--mt-bench FILE] [--vllm-python PYTHON] [--device cuda] [--short]

Each step writes the file of its name in benchmarks/results/; `--only NAME` runs one step. Then the
tables of the docs are written. `--short` tests the scripts on a few tokens and writes to --output
only. On CUDA a large shape with random weights is measured, too. NAME.json has speeds on a CPU with
AVX-512. Those on one without it are kept beside them in NAME_avx2.json, those on one with AMX in
NAME_amx.json.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common import RESULTS, TARGET
from torch.backends import cpu

from peagle.backends.cpu.library import load

HERE = Path(__file__).resolve().parent
GRID = [sys.executable, "-m", "peagle", "bench", TARGET, "--repeats", "1", "--ignore-eos"]

ACCEPTANCE = [sys.executable, str(HERE / "acceptance.py")]
CORRECTION = [sys.executable, str(HERE.parent / "packages" / "peagle-vllm" / "measure.py")]


class Step(NamedTuple):
    """One command, by its result's name."""

    name: str
    command: list[str]
    missing: str | None = None  # why it is left out


class Sizes(NamedTuple):
    """Options for the amount of work; `short` is None if even that takes minutes."""

    full: str
    short: str | None


ROWS = Sizes(
    "--k 1,3,5,7 --concurrency 1,2,4,8 --limit 12 --max-tokens 64",
    "--k 3 --concurrency 2 --limit 2 --max-tokens 4",
)
SHAPE = Sizes(
    "openai/gpt-oss-20b --k 3,5,7 --concurrency 1,2,4,8,16,32,64 --max-tokens 256",
    "openai/gpt-oss-20b --k 3 --concurrency 1 --limit 1 --max-tokens 8",
)
CONTEXT = Sizes(
    "--context 150,1000,2000,4000,7500 --k 7 --limit 12 --max-tokens 48 --batch 1", None
)
KINDS = Sizes("--kinds --k 7", None)
ENGINES = Sizes("", "--concurrency 1 --prompts 1,1 --repeats 1,1 --max-tokens 4,4")
OTHER_TARGETS = ("qwen", "gemma")  # Qwen2.5-Coder-0.5B and Gemma 3 270M
SPEEDS = ("bench", "engines", "engines_qwen", "engines_gemma", "trees", "training_speed")
SCRIPTS = {
    "acceptance": Sizes("", "--k 3 --limit 1 --max-tokens 8"),
    "engines": ENGINES,
    "families": Sizes("", "--families gpt_oss"),
    "lossless": Sizes("", None),
    "training_speed": Sizes("", None),
    "trees": Sizes("", "--limit 2 --max-tokens 4 --repeats 2 --concurrency 1,2"),
}


def steps(args: argparse.Namespace) -> list[Step]:
    """The commands, in order."""
    mt_bench = ["--mt-bench", str(args.mt_bench)] if args.mt_bench else []
    vllm = ["--vllm-python", str(args.vllm_python)] if args.vllm_python else []
    no_mt_bench = None if mt_bench else "MT-Bench is not given: name it with --mt-bench"
    no_vllm = None if vllm else "no interpreter has vLLM: name it with --vllm-python"
    device = ["--device", args.device]
    given = {
        "acceptance": mt_bench,
        "engines": [] if args.short else vllm,  # which takes minutes to start
        "families": vllm,
        "training_speed": device,
        "trees": mt_bench,
    }

    def step(name: str, command: list[str], sizes: Sizes, missing: str | None = None) -> Step:
        options = sizes.short if args.short else sizes.full
        if options is None:
            return Step(name, command, "takes minutes, and tests run its parts")
        return Step(name, [*command, *options.split()], missing)

    found = [
        step("bench", [*GRID, *device], ROWS),
        step("acceptance_trees", [*ACCEPTANCE, *mt_bench], Sizes("--trees", None)),
        step("acceptance_kinds", [*ACCEPTANCE, *mt_bench], KINDS, no_mt_bench),
        step("acceptance_context", ACCEPTANCE, CONTEXT),
        step("vllm_correction", [*CORRECTION, *vllm], Sizes("", None), no_vllm),
    ]
    for name, sizes in SCRIPTS.items():
        script = [sys.executable, str(HERE / f"{name}.py"), *given.get(name, [])]
        found.append(step(name, script, sizes))
    for name in OTHER_TARGETS:
        file = getattr(args, name)
        script = [sys.executable, str(HERE / "engines.py"), *vllm, "--target", str(file)]
        missing = None if file else f"no GGUF file of {name} is given: name it with --{name}"
        found.append(step(f"engines_{name}", script, ENGINES._replace(short=None), missing))
    if args.device.startswith("cuda"):
        script = [sys.executable, str(HERE / "random_weights.py"), *device]
        found.append(step("bench-gpt-oss-20b", script, SHAPE))
    return found


def file_name(step: str, device: str) -> str:
    """The file of a step's result."""
    if device != "cpu" or step not in SPEEDS:
        return f"{step}.json"
    if cpu.get_cpu_capability() == "AVX2":
        return f"{step}_avx2.json"
    return f"{step}_amx.json" if load().tiles else f"{step}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mt-bench", default=os.environ.get("MT_BENCH"), metavar="FILE")
    parser.add_argument("--vllm-python", default=os.environ.get("PEAGLE_VLLM_PYTHON"))
    for name in OTHER_TARGETS:
        parser.add_argument(f"--{name}", metavar="FILE", help="its GGUF file, for engines.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--short", action="store_true", help="a few tokens of everything")
    parser.add_argument("--only", help="one step, by its result's name")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if args.short and args.output == RESULTS:
        parser.error("--short writes meaningless results: name another --output")
    planned = steps(args)
    chosen = [step for step in planned if args.only in (None, step.name)]
    if not chosen:
        names = ", ".join(step.name for step in planned)
        parser.error(f"--only {args.only}: choose from {names}")
    for step in chosen:
        if step.missing:
            print(f"--- {step.name}: left out: {step.missing}", flush=True)
            continue
        print(f"--- {step.name}", flush=True)
        started = time.monotonic()
        output = args.output / file_name(step.name, args.device)
        done = subprocess.run([*step.command, "--output", str(output)], check=False)
        if done.returncode:
            sys.exit(f"{step.name} ended with code {done.returncode}")
        print(f"--- {step.name}: {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    if not args.short:
        subprocess.run([sys.executable, str(HERE / "tables.py")], check=True)


if __name__ == "__main__":
    main()
