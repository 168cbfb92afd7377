"""Time to prepare an example for P-EAGLE and for EAGLE-3, 2,048 tokens, K = 8, part by part.

    python benchmarks/batch_preparation.py --data answers.jsonl.gz [--repeats 200]

Some answers are captured first (peagle data capture); their files then come from the page cache. An
example is what training takes: documents packed into 2,048 tokens with the target's states, the
elements drawn, the segments, the mask. Rows: P-EAGLE with the mask of a GPU and with that of a CPU;
EAGLE-3 as this project trains it (the same elements, a dense mask everywhere); and the loader of an
EAGLE-3 that knows of no deeper elements: one depth, causal. All are prepared for the same examples
in turn, so that noise hits all alike; medians of CPU time, also for
the mask of a GPU.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from common import RESULTS, TARGET, captured, environment, write_json
from torch import Tensor

from peagle.data.captured import Captured
from peagle.data.dataset import read_examples
from peagle.methods.base import Elements
from peagle.model.loader import load_target
from peagle.model.target import Target
from peagle.train.batches import Batches
from peagle.train.cod import sample_elements
from peagle.train.config import TrainConfig
from peagle.train.mask import block_mask, visible
from peagle.train.partition import partition

TOKENS, DEPTHS, DOCUMENTS = 2048, 8, 64
PARTS = ("read", "elements", "segments", "mask")
Mask = Callable[[Elements, Tensor], object]


class Loader(NamedTuple):
    """What an example is prepared for."""

    name: str
    depths: int
    mask: Mask
    against: tuple[str, ...] = ()  # the loaders it is compared with


LOADERS = (
    Loader("p-eagle, GPU mask", DEPTHS, block_mask, ("eagle3 here", "one depth, GPU mask")),
    Loader("p-eagle, CPU mask", DEPTHS, visible, ("eagle3 here", "one depth, CPU mask")),
    Loader("eagle3 here", DEPTHS, visible),
    Loader("one depth, GPU mask", 1, block_mask),
    Loader("one depth, CPU mask", 1, visible),
)


def prepare(
    loader: Loader, number: int, batches: Batches, states: Captured, target: Target
) -> tuple[list[float], int]:
    """Seconds of each part for one example, and its elements."""
    config = TrainConfig(Path())
    generator = torch.Generator().manual_seed(number)
    at = [time.process_time()]
    sequence = batches.sequence(number)
    states.output(batches.documents(number), target)
    at.append(time.process_time())
    elements = sample_elements(
        sequence.supervised,
        sequence.documents,
        loader.depths,
        config.ratio,
        generator,
    )
    at.append(time.process_time())
    (part,) = partition(elements, sequence.documents, 1)
    at.append(time.process_time())
    loader.mask(part.elements, sequence.documents)
    at.append(time.process_time())
    return [end - start for start, end in zip(at, at[1:], strict=False)], len(elements.anchor)


def measure(batches: Batches, states: Captured, target: Target, repeats: int) -> list[dict]:
    """A row a loader."""
    seconds: dict[str, list[list[float]]] = {loader.name: [] for loader in LOADERS}
    sizes: dict[str, list[int]] = {loader.name: [] for loader in LOADERS}
    for number in range(-3, repeats):  # the first three warm up
        turn = number % len(LOADERS)
        for loader in LOADERS[turn:] + LOADERS[:turn]:
            taken, elements = prepare(loader, max(number, 0), batches, states, target)
            if number >= 0:
                seconds[loader.name].append(taken)
                sizes[loader.name].append(elements)
    rows = []
    for loader in LOADERS:
        taken = seconds[loader.name]
        parts = [round(1000 * median(part), 3) for part in zip(*taken, strict=True)]
        rows.append({
            "loader": loader.name, "elements": round(mean(sizes[loader.name])),
            "milliseconds": round(1000 * median(map(sum, taken)), 3),
            "parts": dict(zip(PARTS, parts, strict=True)),
            "ratio_to": {
                other: round(median(_ratios(taken, seconds[other])), 3) for other in loader.against
            },
        })  # fmt: skip
    return rows


def _ratios(taken: list[list[float]], others: list[list[float]]) -> list[float]:
    """Of the same example, prepared at about the same time."""
    return [sum(a) / sum(b) for a, b in zip(taken, others, strict=True)]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    target = load_target(TARGET, dtype="bfloat16")
    examples = read_examples(args.data, target.tokenizer, TOKENS)[:DOCUMENTS]
    with tempfile.TemporaryDirectory() as folder:
        states = captured(Path(folder), target, examples, TOKENS)
        batches = Batches(examples, batch=1, pack=TOKENS, seed=0)
        rows = measure(batches, states, target, args.repeats)
        tokens = mean(len(batches.sequence(n).ids) for n in range(args.repeats))
    settings = {"target": TARGET, "tokens": TOKENS, "tokens_mean": round(tokens), "depths": DEPTHS,
                "documents": len(examples), "capture": states.origin.dtype, "repeats": args.repeats,
                "threads": torch.get_num_threads()}  # fmt: skip
    return {**environment(), "settings": settings, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="answers of the target")
    parser.add_argument("--repeats", type=int, default=200, help="examples")
    parser.add_argument("--output", type=Path, default=RESULTS / "batch_preparation.json")
    args = parser.parse_args()
    report = run(args)
    for row in report["rows"]:
        parts = "  ".join(f"{name} {taken:.2f}" for name, taken in row["parts"].items())
        ratios = "  ".join(f"{ratio:.2f} × {name}" for name, ratio in row["ratio_to"].items())
        print(f"{row['loader']:20} {row['milliseconds']:7.2f} ms ({parts})  {ratios}")
    write_json(args.output, report)


if __name__ == "__main__":
    main()
