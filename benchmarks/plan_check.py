"""What `peagle plan` says of memory against what training then uses.

    python benchmarks/plan_check.py --data answers.jsonl.gz

Each configuration trains smollm2-135m for ten steps, in which kernels are made for most numbers of
rows and gaps open between what is kept, in a process of its own, whose peak resident memory is
compared (CPU). The plan's constants for a CPU were chosen by them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, TARGET, environment, write_json

from peagle.data.dataset import read_examples
from peagle.model.template import load_tokenizer

STEPS = 10
CONFIGURATIONS: list[dict[str, Any]] = [
    {"method": "p-eagle", "context": 1024, "segments": 1, "layers": 4},
    {"method": "p-eagle", "context": 2048, "segments": 1, "layers": 4},
    {"method": "p-eagle", "context": 4096, "segments": 1, "layers": 2},
    {"method": "p-eagle", "context": 4096, "segments": 4, "layers": 4},
    {"method": "eagle3", "context": 1024, "segments": 1, "layers": 1},
    {"method": "eagle3", "context": 2048, "segments": 1, "layers": 1},
    {"method": "p-eagle", "context": 1536, "segments": 1, "layers": 2},
    {"method": "p-eagle", "context": 3072, "segments": 2, "layers": 3},
]
MEASURE = (
    "import resource, sys; from peagle.cli.main import app; "
    "app(standalone_mode=False); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
)


def answered(data: Path) -> float:
    """Share of the tokens that are answers."""
    examples = read_examples(
        data, load_tokenizer(TARGET), max(c["context"] for c in CONFIGURATIONS)
    )
    return sum(sum(e.supervised) for e in examples) / sum(len(e.ids) for e in examples)


def planned(setting: dict[str, Any], share: float) -> int:
    """Bytes."""
    options = [f"--{name}={value}" for name, value in setting.items()]
    options += [f"--answered={share}"]
    command = [sys.executable, "-m", "peagle", "plan", TARGET, "--tokens=100000", "--json"]
    run = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)["total_bytes"]


def used(setting: dict[str, Any], data: Path) -> int:
    """Peak bytes of a short training."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"--data={data}", f"--output={folder}", f"--steps={STEPS}",
            f"--max-length={setting['context']}", f"--pack={setting['context']}",
            f"--segments={setting['segments']}", f"--layers={setting['layers']}",
            f"--method={setting['method']}", "--eval-every=1000000",
        ]  # fmt: skip
        command = [sys.executable, "-c", MEASURE, "train", TARGET, *options]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="answers of the target")
    parser.add_argument("--output", type=Path, default=RESULTS / "plan_check.json")
    args = parser.parse_args()
    rows, share = [], round(answered(args.data), 4)
    print("method   context  S  layers  planned    used   ratio")
    for setting in CONFIGURATIONS:
        guess, peak = planned(setting, share), used(setting, args.data)
        rows.append({**setting, "planned_bytes": guess, "used_bytes": peak,
                     "ratio": round(guess / peak, 3)})  # fmt: skip
        sizes = f"{guess / 2**30:7.2f} {peak / 2**30:7.2f}"
        head = f"{setting['method']:7} {setting['context']:8} {setting['segments']:2}"
        print(f"{head} {setting['layers']:7}  {sizes} {guess / peak:7.2f}", flush=True)
        report = {"target": TARGET, "answered": share, "steps": STEPS, "rows": rows}
        write_json(args.output, {**environment(), **report})


if __name__ == "__main__":
    main()
