"""What each choice of the recipe is worth: short trainings that differ in one thing.

    peagle data capture smollm2-135m --data answers.jsonl --output capture
    python benchmarks/ablations.py --data capture --held-out measured.jsonl --work runs/cells

Every cell trains a head of smollm2-135m on the same documents until it has seen so many answer
tokens, and is measured by the walk over held-out answers (train/walk.py): chains of 3 and 7, and a
tree of 12 where the method drafts trees. Cells run two at a time, one thread each; a cell is
written when it is done, and a second call goes on.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import RESULTS, TARGET, environment, load, whole_numbers, write_json

from peagle.catalog import head_path
from peagle.data.captured import Captured
from peagle.data.dataset import read_examples
from peagle.engine.llm import LLM
from peagle.methods.load import load_drafter
from peagle.methods.registry import method_of
from peagle.methods.spec import HeadSpec
from peagle.model.drafter import Drafter
from peagle.train import loss as losses
from peagle.train.config import TrainConfig
from peagle.train.trainer import Trainer
from peagle.train.walk import Round, Walk
from peagle.train.warm_start import new_drafter, with_correction, with_norms

BASE = HeadSpec(draft_vocab=7680)
E = {"method": "eagle3"}
CELLS: dict[str, dict[str, Any]] = {  # settings of HeadSpec and TrainConfig that differ, and others
    "base": {},
    "linear": {"cooldown": 1.0},
    "correction 6e-4": {"correction_lr": 6e-4},
    "all tokens": {"all_tokens": True},
    "fc_norm": {"fc_norm": True},
    "pack 6e-4": {"pack": 2048},
    "pack 1.2e-3": {"pack": 2048, "lr": 1.2e-3},
    "token path": {"token_path": True},
    "decay 1": {"decay": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "E base": E,
    "E fc_norm": E | {"fc_norm": True},
    "E fc_norm, norm_output": E | {"fc_norm": True, "norm_output": True},
    "E pack 6e-4": E | {"pack": 2048},
    "E pack 1.2e-3": E | {"pack": 2048, "lr": 1.2e-3},
    "E all tokens": E | {"all_tokens": True},
    "E decay 0.8": E | {"decay": 0.8},
    "E linear": E | {"cooldown": 1.0},
    # On from the heads in heads/.
    "on": {"on": True},
    "on, fc_norm": {"on": True, "fc_norm": True},
    "E on, fc_norm": E | {"on": True, "fc_norm": True},
    "E on, norm_output": E | {"on": True, "norm_output": True},
    "E on": E | {"on": True},
    "E on, fc_norm, norm_output": E | {"on": True, "fc_norm": True, "norm_output": True},
}
HEAD_FIELDS = ("method", "fc_norm", "norm_output")
TRAIN_FIELDS = ("decay", "lr", "correction_lr", "cooldown", "pack")
COPIED = 6  # tokens before a token that occurred before it in the answer, and were followed by it


def build(llm: LLM, cell: dict[str, Any], answers: list[list[int]], seed: int) -> Drafter:
    """The head that a cell trains."""
    spec = replace(BASE, **{name: cell[name] for name in HEAD_FIELDS if name in cell})
    torch.manual_seed(seed)
    if cell.get("on"):
        folder = head_path(TARGET, spec.method)
        assert folder is not None
        drafter = with_norms(load_drafter(folder, llm.target).float(), llm.target, answers, spec)
    else:
        drafter = new_drafter(llm.target, answers, spec)
    if cell.get("token_path"):
        hidden = drafter.config.transformer.hidden_size
        attention = drafter.layers[0].self_attn
        with torch.no_grad():
            for part in (attention.q_proj, attention.k_proj, attention.v_proj):
                part.weight[:, :hidden] *= 10
    if method_of(drafter.config).parallel:
        drafter = with_correction(drafter, frozen=False)
    return drafter


def train(
    llm: LLM, cell: dict[str, Any], seed: int, args: argparse.Namespace
) -> tuple[Drafter, float]:
    """(the averaged head, answer tokens a second)."""
    captured = Captured(args.data)
    examples = captured.examples()
    answers = [[i for i, said in zip(*e, strict=True) if said] for e in examples]
    folder = args.work / f"run-{args.cell}-{seed}".replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    settings = {name: cell[name] for name in TRAIN_FIELDS if name in cell}
    config = TrainConfig(
        folder, seed=seed, max_train_tokens=args.tokens, save_every=10**9, segments=1, **settings
    )
    drafter = build(llm, cell, answers, seed)
    trainer = Trainer(config, llm.target, drafter, examples, states=captured.output)
    if cell.get("all_tokens"):
        trainer.drafted[:] = True
    plain = losses.labels_of
    sharper = lambda logits: plain(logits / cell["temperature"])  # noqa: E731
    started = time.perf_counter()
    with patch.object(losses, "labels_of", sharper if "temperature" in cell else plain):
        trainer.run()
    if not trainer.finished:
        sys.exit(f"stopped in {args.cell!r}: the same command begins it anew")
    speed = trainer.progress.answer_tokens / (time.perf_counter() - started)
    shutil.rmtree(folder / "checkpoints")
    return trainer.averaged(llm.target.dtype), speed


def copies(ids: list[int], start: int) -> list[bool]:
    """Whether each token of a document is a copy of what followed the same six tokens before."""
    seen, found = dict[tuple[int, ...], set[int]](), [False] * len(ids)
    for at in range(start + COPIED, len(ids)):
        before = tuple(ids[at - COPIED : at])
        found[at] = ids[at] in seen.get(before, ())
        seen.setdefault(before, set()).add(ids[at])
    return found


def summary(walk: Walk, documents: list[list[Round]]) -> dict[str, Any]:
    """Acceptance length, in copies and elsewhere, and [accepted, rounds] of each document."""
    sums = {True: [0, 0], False: [0, 0]}
    for example, rounds in zip(walk.documents, documents, strict=True):
        copied = copies(example.ids, example.supervised.index(True))
        for one in rounds:
            counted = sums[copied[one.newest + 1]]
            counted[0] += one.accepted
            counted[1] += 1
    lengths = {kind: round(1 + a / max(1, n), 4) for kind, (a, n) in sums.items()}
    each = [[sum(one.accepted for one in rounds), len(rounds)] for rounds in documents]
    total = [sum(column) for column in zip(*each, strict=True)]
    return {
        "acceptance_length": round(1 + total[0] / total[1], 4),
        "in_copies": lengths[True],
        "elsewhere": lengths[False],
        "by_document": each,
    }


def run_cell(args: argparse.Namespace) -> None:
    """Train and measure one cell; write its row."""
    llm = load("bfloat16")
    assert llm.target.tokenizer is not None
    walk = Walk(llm.target, read_examples(args.held_out, llm.target.tokenizer, 2048))
    [seed], cell = args.seeds, CELLS[args.cell]
    drafter, speed = train(llm, cell, seed, args)
    started = time.perf_counter()
    three, seven = walk.chains(drafter, [3, 7])
    found = {"chain of 3": summary(walk, three), "chain of 7": summary(walk, seven)}
    if method_of(drafter.config).parallel:
        found["tree of 12"] = summary(walk, walk.trees(drafter, 12))
    row = {"cell": args.cell, "seed": seed, "tokens": args.tokens}
    row |= {"tokens_per_second": round(speed, 1), **found}
    write_json(args.work / f"{args.cell}-{seed}.json", row)
    lengths = [part["acceptance_length"] for part in found.values()]
    took = time.perf_counter() - started
    print(f"{args.cell:24} seed {seed}: {lengths}, {speed:.0f} tok/s, measured in {took:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="captured answers of the target")
    parser.add_argument("--held-out", type=Path, required=True, help="answers to measure on")
    parser.add_argument("--work", type=Path, required=True, help="folder for what cells leave")
    parser.add_argument("--tokens", type=int, default=400_000, help="answer tokens a cell")
    parser.add_argument("--seeds", type=whole_numbers, default=[0])
    parser.add_argument("--cells", default=";".join(CELLS), help="parted by ;")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS / "ablations.json")
    args = parser.parse_args()
    if args.cell:
        run_cell(args)
        return
    wanted = [(name, seed) for seed in args.seeds for name in args.cells.split(";")]

    def start(name: str, seed: int) -> None:
        command = [sys.executable, __file__, "--cell", name, "--seeds", str(seed)]
        for option in ("data", "held_out", "work", "tokens"):
            command += ["--" + option.replace("_", "-"), str(getattr(args, option))]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)

    with ThreadPoolExecutor(2) as pool:
        left = [(n, s) for n, s in wanted if not (args.work / f"{n}-{s}.json").is_file()]
        list(pool.map(lambda cell: start(*cell), left))
    rows = [json.loads((args.work / f"{n}-{s}.json").read_text()) for n, s in wanted]
    write_json(args.output, {**environment(), "rows": rows})


if __name__ == "__main__":
    main()
