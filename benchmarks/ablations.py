"""What each choice of the recipe is worth: short trainings that differ in one thing.

    peagle data capture smollm2-135m --data answers.jsonl.gz --output capture
    python benchmarks/ablations.py --data capture --heads runs/ablations [--seeds 0,1]

Every cell trains a head of smollm2-135m on the same documents, until it has seen so many answer
tokens, and decodes the first HumanEval prompts with it (greedy, chat template): chains of 3 and 7,
and a tree of 12 where the method drafts trees. A cell is written when it is done, and a second call
goes on. "features n−1" needs documents captured at --feature-layers 2,15,29, in --last-layer-data.
"""

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import RESULTS, as_ids, environment, human_eval, load, whole_numbers, write_json
from torch import Tensor

from peagle.bench.summary import acceptance_row
from peagle.data.captured import Captured
from peagle.data.example import Example
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.methods.load import load_drafter
from peagle.methods.registry import method_of
from peagle.methods.spec import HeadSpec
from peagle.model.drafter import Drafter
from peagle.train import loss as losses
from peagle.train.config import TrainConfig
from peagle.train.loss import Divergence, Wanted, divergence
from peagle.train.trainer import Trainer
from peagle.train.warm_start import new_drafter, with_correction

BASE = HeadSpec(draft_vocab=7680)
BASE_TRAINING = {"ratio": 0.5, "floor": 0.1, "decay": 1.0}
EAGLE3 = {"method": "eagle3"}
CELLS: dict[str, dict[str, Any]] = {  # fields of HeadSpec and TrainConfig that differ
    "base": {},
    "decay 0.5": {"decay": 0.5},
    "total variation": {"distance": "total variation"},
    "cross-entropy": {"loss": "cross-entropy"},
    "r 0.8": {"ratio": 0.8},
    "decay 0.5, r 0.7": {"decay": 0.5, "ratio": 0.7},
    "decay 0.5, no floor": {"decay": 0.5, "floor": 0.0},
    "decay 0.5, prompts": {"decay": 0.5, "prompts": True},  # trained on, too
    "decay 0.5, lr 1e-3": {"decay": 0.5, "lr": 1e-3},
    "1 layer": {"layers": 1},
    "2 layers": {"layers": 2},
    "lr 3e-4": {"lr": 3e-4},
    "features n-1": {"feature_layers": (2, 15, 29)},
    "embedding trained": {"embedding": "full"},
    "cold start": {"warm_start": False},
    "correction": {"correction": "joint"},
    "correction, base frozen": {"correction": "frozen"},
    "decay 0.5, correction": {"decay": 0.5, "correction": "joint"},
    "decay 0.5, no floor, correction": {"decay": 0.5, "floor": 0.0, "correction": "joint"},
    "EAGLE-3": EAGLE3,
    "EAGLE-3, all elements": EAGLE3 | {"ratio": 1.0},
    "EAGLE-3, all elements, decay 0.8": EAGLE3 | {"ratio": 1.0, "decay": 0.8},
    "EAGLE-3, decay 0.5": EAGLE3 | {"decay": 0.5},
}
HEAD_FIELDS = ("layers", "method", "feature_layers", "embedding", "warm_start")
TRAIN_FIELDS = ("ratio", "floor", "decay", "lr", "loss")
DRAFTS: dict[str, dict[str, Any]] = {
    "chain of 3": {"k": 3},
    "chain of 7": {"k": 7},
    "tree of 12": {"nodes": 12, "lookup": False},
}


def total_variation(draft_logits: Tensor, wanted: Wanted) -> Divergence:
    """0.9 · Σ |p − q| + 0.1 · KL, and its gradient by the draft logits."""
    kl = divergence(draft_logits, wanted)
    q = draft_logits.float().softmax(-1)
    sign = (q - wanted.p).sign()
    gradient = q * (sign - (q * sign).sum(-1, keepdim=True))
    distance = (q - wanted.p).abs().sum(-1)
    return Divergence(0.9 * distance + 0.1 * kl.each, 0.9 * gradient + 0.1 * kl.gradient)


def build(
    llm: LLM, changes: dict[str, Any], examples: list[Example], seed: int, base: Path
) -> Drafter:
    """The head that a cell trains."""
    if changes.get("correction") == "frozen":
        return with_correction(load_drafter(base, llm.target).float(), frozen=True)
    answers = [[i for i, said in zip(*e, strict=True) if said] for e in examples]
    spec = replace(BASE, **{key: changes[key] for key in HEAD_FIELDS if key in changes})
    torch.manual_seed(seed)
    drafter = new_drafter(llm.target, answers, spec)
    return with_correction(drafter, frozen=False) if "correction" in changes else drafter


def train(llm: LLM, name: str, seed: int, args: argparse.Namespace) -> tuple[Drafter, float]:
    """(the head, answer tokens a second)."""
    changes = CELLS[name]
    captured = Captured(args.last_layer_data if "feature_layers" in changes else args.data)
    folder = args.heads / f"{name}-{seed}".replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    examples, tokens = captured.examples(), args.tokens
    drafter = build(llm, changes, examples, seed, args.heads / f"base-{seed}" / "head")
    ours = BASE_TRAINING | {key: changes[key] for key in TRAIN_FIELDS if key in changes}
    if "prompts" in changes:  # over the same documents, so with more tokens
        answers = sum(sum(example.supervised) for example in examples)
        examples = [Example(e.ids, [True] * len(e.ids)) for e in examples]
        tokens = tokens * sum(len(e.ids) for e in examples) // answers
    config = TrainConfig(
        folder, seed=seed, max_train_tokens=tokens, save_every=10**9, segments=1, **ours
    )
    trainer = Trainer(config, llm.target, drafter, examples, captured=captured)
    started = time.perf_counter()
    compared = total_variation if "distance" in changes else divergence
    with patch.object(losses, "divergence", compared):
        trainer.run()
    if not trainer.finished:
        sys.exit(f"stopped in {name!r}: the same command begins it anew")
    speed = trainer.progress.answer_tokens / (time.perf_counter() - started)
    shutil.rmtree(folder / "checkpoints")
    return drafter.to(llm.target.dtype).eval(), speed


def measure(llm: LLM, drafter: Drafter, prompts: list[list[int]]) -> dict[str, Any]:
    """Acceptance of each kind of draft: over all prompts, and [accepted, rounds] of each."""
    found: dict[str, Any] = {"acceptance_length": {}, "accepted_per_position": {}, "by_prompt": {}}
    for draft, how in DRAFTS.items():
        if "nodes" in how and not method_of(drafter.config).parallel:
            continue
        answers = llm.use(drafter, **how).generate(prompts, SamplingParams(max_tokens=96))
        total = sum((answer.stats for answer in answers), Stats())
        row = acceptance_row(total)
        for name in ("acceptance_length", "accepted_per_position"):
            found[name][draft] = row[name]
        each = [[sum(answer.stats.accepted), answer.stats.rounds] for answer in answers]
        found["by_prompt"][draft] = each
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="captured answers of the target")
    parser.add_argument("--last-layer-data", type=Path, help='the same for "features n-1"')
    parser.add_argument("--heads", type=Path, required=True, help="folder for the heads")
    parser.add_argument("--tokens", type=int, default=200_000, help="answer tokens a cell")
    parser.add_argument("--seeds", type=whole_numbers, default=[0, 1])
    parser.add_argument(
        "--cells", type=lambda text: text.split(";"), default=list(CELLS), help="parted by ;"
    )
    parser.add_argument("--limit", type=int, default=64, help="HumanEval prompts")
    parser.add_argument("--output", type=Path, default=RESULTS / "ablations.json")
    args = parser.parse_args()
    report = json.loads(args.output.read_text()) if args.output.is_file() else {"rows": []}
    llm = load("bfloat16", batch=16)
    prompts = as_ids(llm, human_eval(args.limit))
    for seed in args.seeds:
        for name in args.cells:
            settings = {"cell": name, "seed": seed, "tokens": args.tokens, "prompts": args.limit}
            if any(settings.items() <= row.items() for row in report["rows"]):
                continue
            drafter, speed = train(llm, name, seed, args)
            row = settings | {"tokens_per_second": round(speed, 1)} | measure(llm, drafter, prompts)
            report["rows"].append(row)
            write_json(args.output, {**environment(), "rows": report["rows"]})
            print(
                f"{name:24} seed {seed}: {row['acceptance_length']}, {speed:.0f} tok/s", flush=True
            )


if __name__ == "__main__":
    main()
