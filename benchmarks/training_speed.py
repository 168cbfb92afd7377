"""Training speed of a head, and its share of the device's peak.

    python benchmarks/training_speed.py [--data answers.jsonl.gz] [--device cuda]

Without --data it takes the answers in heads/ to prompts that the target wrote itself.
Each row trains smollm2-135m's head for some steps in one way: online or from captured features,
together with a correction, documents one by one or packed, in segments, recomputed, EAGLE-3. Rows
take turns, so that noise hits all alike; medians of steps.
FLOPs are those that torch counts in the same step (products and attention, forward and backward,
the target's included); the peak is a product of 4,096 × 4,096 matrices in bf16, or in float32 where
the device has no products of bf16, measured in the same process.
"""

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import tables
import torch
from common import RESULTS, TARGET, environment, write_json
from torch.utils.flop_counter import FlopCounterMode

from peagle.data.captured import Captures
from peagle.data.dataset import read_examples
from peagle.data.example import Example
from peagle.model.loader import load_target
from peagle.model.target import Target
from peagle.train.capture import CaptureConfig, capture, in_process, plan_capture
from peagle.train.config import TrainConfig
from peagle.train.passes import fast_products, multiplies_bf16
from peagle.train.processes import keep_freed_memory
from peagle.train.spec import HeadSpec
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter, with_correction

HEADS = RESULTS.parents[1] / "heads"
sys.path.append(str(HEADS))
from answers import unpack_synth  # noqa: E402

LENGTH, DOCUMENTS = 2048, 32
ROWS: dict[str, dict[str, Any]] = {  # fields of TrainConfig and HeadSpec that differ
    "p-eagle": {},
    "p-eagle, captured": {"captured": True},
    "p-eagle, captured, correction": {"captured": True, "correction": True},  # trained jointly
    "p-eagle, packed": {"pack": LENGTH},
    "p-eagle, packed, captured": {"pack": LENGTH, "captured": True},
    "p-eagle, packed, 4 segments": {"pack": LENGTH, "segments": 4},
    "p-eagle, packed, recomputed": {"pack": LENGTH, "recompute": True},
    "p-eagle, captured, compiled": {"captured": True, "compile": True},
    "eagle3": {"method": "eagle3"},
    "eagle3, captured": {"method": "eagle3", "captured": True},
}


class Everything(nullcontext[None]):
    """Replaces the module tracker of a FLOP counter, whose hooks fail where a loss takes gradients
    in its forward."""

    parents = frozenset({"Global"})


@dataclass
class Row:
    """One way to train, and what its steps took."""

    trainer: Trainer
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of answers
    flops: list[int] = field(default_factory=list)

    def step(self, *, count: bool) -> None:
        """One optimizer step, timed, or its FLOPs counted (which takes time)."""
        trainer = self.trainer
        before, started = trainer.progress.answer_tokens, time.perf_counter()
        work = trainer._sample()
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = Everything()
        with counter if count else nullcontext():
            result = trainer._forward_backward(work, trainer._reduce_counts(work))
        trainer._update(result)
        trainer.progress.step += 1
        if trainer.target.device.type == "cuda":
            torch.cuda.synchronize()
        taken, tokens = time.perf_counter() - started, trainer.progress.answer_tokens - before
        if count:
            self.flops.append(counter.get_total_flops() // tokens)
        else:
            self.seconds.append(taken / tokens)
            self.tokens.append(tokens)


def run_steps(rows: list[Row], steps: int, device: torch.device) -> None:
    """Steps that are not timed, then timed ones in turn, set up as those of `Trainer.run`."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    with fast_products(device):
        for row in rows:
            for _ in range(3):  # kernels and graphs are made
                row.step(count=False)
            row.seconds, row.tokens = [], []
            row.step(count=True)
        for _ in range(steps):
            for row in rows:
                row.step(count=False)


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product."""
    a, b = (torch.randn(4096, 4096, dtype=dtype, device=device) for _ in range(2))
    taken = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        c = a @ b
        float(c[0, 0])  # waits
        taken.append(time.perf_counter() - started)
    return 2 * 4096**3 / median(taken[1:])


def captured(folder: Path, target: Target, examples: list[Example], length: int) -> Captures:
    """States of the target for documents of at most `length` tokens, captured into `folder`."""
    config = CaptureConfig(folder, max_length=length)
    plan = plan_capture(target, examples, config)
    capture(in_process(target, plan.origin.feature_layers), examples, folder, plan)
    return Captures([folder])


def make(target: Target, examples: list[Example], states: Captures, row: dict[str, Any]) -> Row:
    """A training that is ready to run; it is never saved."""
    changes = dict(row)
    method, stored = changes.pop("method", "p-eagle"), changes.pop("captured", False)
    spec = HeadSpec(method, layers=4 if method == "p-eagle" else 1, draft_vocab=7680)
    answers = [[token for token, trained in zip(*e, strict=True) if trained] for e in examples]
    torch.manual_seed(0)
    drafter = new_drafter(target, answers, spec)
    if changes.pop("correction", False):
        drafter = with_correction(drafter, frozen=False)
    settings = {"segments": 1, **changes}
    config = TrainConfig(Path(), save_every=10**9, epochs=100, **settings)
    return Row(Trainer(config, target, drafter, examples, states=states.output if stored else None))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    device = torch.device(args.device)
    target = load_target(TARGET, dtype="bfloat16", device=args.device)
    if device.type == "cpu":
        keep_freed_memory()  # as in `peagle train`
    with tempfile.TemporaryDirectory() as folder:
        data = args.data
        if data is None:
            data = Path(folder, "synth.jsonl")
            unpack_synth(HEADS / "answers.jsonl.gz", data)
        examples = list(islice(read_examples(data, target.tokenizer, LENGTH), DOCUMENTS))
        states = captured(Path(folder, "captured"), target, examples, LENGTH)
        rows = {name: make(target, examples, states, row) for name, row in ROWS.items()}
        run_steps(list(rows.values()), args.steps, device)
        dtype = torch.bfloat16 if multiplies_bf16(device) else torch.float32
        peak_flops = peak(device, dtype)
    settings = {"target": TARGET, "documents": len(examples), "pack": LENGTH, "steps": args.steps,
                "threads": torch.get_num_threads()}  # fmt: skip
    lines = [line(name, row, peak_flops) for name, row in rows.items()]
    about = {**environment(args.device), "settings": settings}
    found = {"peak_dtype": str(dtype).removeprefix("torch."), "peak_flops": round(peak_flops)}
    return {**about, **found, "rows": lines}


def line(name: str, row: Row, peak_flops: float) -> dict[str, Any]:
    """The report of one row."""
    seconds, flops = median(row.seconds), median(row.flops)
    return {
        "row": name,
        "answer_tokens_per_second": round(1 / seconds, 1),
        "answer_tokens_a_step": round(median(row.tokens)),
        "megaflops_a_token": round(flops / 1e6),
        "share_of_peak": round(flops / seconds / peak_flops, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="answers of the target")
    parser.add_argument("--steps", type=int, default=6, help="timed steps a row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / "training_speed.json")
    args = parser.parse_args()
    report = run(args)
    print("\n".join(tables.training_speed(report)))
    write_json(args.output, report)


if __name__ == "__main__":
    main()
