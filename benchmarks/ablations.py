"""What each choice of the recipe is worth: short trainings that differ in one thing.

    peagle data capture smollm2-135m --data answers.jsonl.gz --output capture
    python benchmarks/ablations.py --data capture [--tokens 100000] [--seeds 0,1]

Every cell trains a P-EAGLE head of smollm2-135m on the same documents and decodes the first
HumanEval prompts with it at K = 5 (greedy, chat template). A cell is written when it is done; a
second call goes on. Writes a table and a plot.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, as_ids, environment, human_eval, load, whole_numbers, write_json
from torch import Tensor, nn

from peagle.data.captured import Captured
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.methods.spec import HeadSpec
from peagle.model.drafter import Drafter
from peagle.train.trainer import TrainConfig, Trainer
from peagle.train.warm_start import new_drafter

K = 5
BASE = HeadSpec(draft_vocab=7680)
CELLS: dict[str, dict[str, Any]] = {  # fields of HeadSpec and TrainConfig that differ
    "base": {},
    "1 layer": {"layers": 1},
    "2 layers": {"layers": 2},
    "hidden state by depth": {},
    "K trained 5": {"depths": 5},
    "r 0.5": {"ratio": 0.5},
    "r 0.8": {"ratio": 0.8},
    "embedding frozen": {"embedding": "shared"},
    "embedding trained": {"embedding": "full"},
    "cross-entropy": {"loss": "cross-entropy"},
    "cold start": {"warm_start": False},
}


class DepthDrafter(Drafter):
    """A hidden state of its own for every depth: what the paper compares the shared one with."""

    def by_depth(self) -> "DepthDrafter":
        table = torch.zeros(self.config.depths - 1, *self.mask_hidden.shape)
        self.mask_hidden = nn.Parameter(table)
        return self

    @property
    def mask_features(self) -> Tensor:
        """(depths − 1, F·E)"""
        return self.mask_hidden


def train(llm: LLM, name: str, seed: int, args: argparse.Namespace, folder: Path) -> Drafter:
    """One head."""
    target = llm.target
    changes = dict(CELLS[name])
    ours = {key: changes.pop(key) for key in ("ratio", "loss") if key in changes}
    captured = Captured(args.data)
    examples = captured.examples()
    answers = [[i for i, said in zip(*e, strict=True) if said] for e in examples]
    torch.manual_seed(seed)
    drafter = new_drafter(target, answers, replace(BASE, **changes))
    if name == "hidden state by depth":
        drafter.__class__ = DepthDrafter
        drafter.by_depth()
    config = TrainConfig(
        folder, seed=seed, max_train_tokens=args.tokens, save_every=10**9, segments=1, **ours
    )
    trainer = Trainer(config, target, drafter, examples, captured=captured)
    trainer.save_head = lambda name: None  # type: ignore[method-assign]
    trainer.run()
    return drafter.to(target.dtype).eval()


def measure(llm: LLM, drafter: Drafter, prompts: list[list[int]]) -> dict[str, Any]:
    """Acceptance at K."""
    answers = llm.use(drafter, K).generate(prompts, SamplingParams(max_tokens=96))
    total = sum((answer.stats for answer in answers), Stats())
    shares = [round(share, 4) for share in total.accepted_per_position]
    return {
        "acceptance_length": round(total.acceptance_length, 4),
        "accepted_per_position": shares,
    }


def table(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Acceptance lengths by cell, and a printed line each."""
    cells: dict[str, list[float]] = {}
    for row in rows:
        cells.setdefault(row["cell"], []).append(row["acceptance_length"])
    for name, lengths in cells.items():
        each = " ".join(f"{length:.3f}" for length in lengths)
        print(f"{name:32} {sum(lengths) / len(lengths):.3f}   ({each})")
    return cells


def plot(cells: dict[str, list[float]], output: Path) -> None:
    """A bar a cell, from the base to its mean; a dot a seed."""
    import matplotlib  # noqa: PLC0415 (needed to draw only)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4))
    base = sum(cells["base"]) / len(cells["base"])
    axes.axvline(base, color="gray", linewidth=1)
    for number, lengths in enumerate(cells.values()):
        mean = sum(lengths) / len(lengths)
        colour = "tab:blue" if mean >= base else "tab:red"
        axes.barh(number, mean - base, left=base, color=colour, alpha=0.5)
        axes.plot(lengths, [number] * len(lengths), "k.")
    axes.set(yticks=range(len(cells)), yticklabels=list(cells))
    axes.set_xlabel(f"acceptance length, HumanEval, K = {K}; a bar from the base, a dot a seed")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="captured answers of the target")
    parser.add_argument("--tokens", type=int, default=100_000, help="answer tokens a cell")
    parser.add_argument("--seeds", type=whole_numbers, default=[0, 1])
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(CELLS))
    parser.add_argument("--limit", type=int, default=32, help="HumanEval prompts")
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
            with tempfile.TemporaryDirectory() as folder:
                drafter = train(llm, name, seed, args, Path(folder))
            report["rows"].append(settings | measure(llm, drafter, prompts))
            write_json(args.output, {**environment(), "k": K, "rows": report["rows"]})
    plot(table(report["rows"]), args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
