"""Learning curves of training runs: loss, accuracy and acceptance length against answer tokens.

    python benchmarks/learning_curve.py runs/p-eagle runs/eagle3 [--output benchmarks/results]
    python benchmarks/learning_curve.py first/p-eagle,second/p-eagle     # --init-from the first

A run is its folder, its metrics.jsonl, or a curve-NAME.json made here before; runs that began with
the head of the one before are joined by commas, and their tokens added up. Writes curve-NAME.json,
NAME being the last folder's, and one plot of all, curves.png.
"""

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from common import RESULTS, write_json

WINDOW = 250_000  # answer tokens a point
SHOWN = (0, 1, 2, 4, 6)  # depths drawn: later ones lie close together

Point = dict[str, Any]


def points(lines: list[dict[str, Any]]) -> list[Point]:
    """Means over windows of the training tokens."""
    windows = groupby(lines, key=lambda line: (line["answer_tokens"] - 1) // WINDOW)
    return [_mean(list(window)) for _, window in windows]


def _mean(lines: list[dict[str, Any]]) -> Point:
    depths = max(len(line["accuracy"]) for line in lines)
    at = [
        [line["accuracy"][d] for line in lines if len(line["accuracy"]) > d] for d in range(depths)
    ]
    point = {
        "answer_tokens": lines[-1]["answer_tokens"],
        "loss": round(sum(line["loss"] for line in lines) / len(lines), 4),
        "accuracy_by_depth": [round(sum(values) / len(values), 4) for values in at],
    }
    measured = [line["acceptance_length"] for line in lines if "acceptance_length" in line]
    return {**point, "acceptance_length": measured[-1]} if measured else point


def read(run: Path) -> tuple[str, list[Point]]:
    """Name and points of a run."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    if not file.is_file():
        sys.exit(f"{run}: no metrics there; name the output of peagle train, or a curve made of it")
    if file.suffix == ".json":
        return file.stem.removeprefix("curve-"), json.loads(file.read_text())["points"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return file.resolve().parent.name, points(lines)


def join(runs: str) -> tuple[str, list[Point]]:
    """Name and points of runs behind each other. A point's `run` counts them: each has held-out
    prompts of its own, so acceptance lengths compare within a run."""
    name, curve = "", list[Point]()
    for run in runs.split(","):
        name, found = read(Path(run))
        seen, before = (curve[-1]["answer_tokens"], curve[-1]["run"] + 1) if curve else (0, 0)
        curve += [
            {**point, "answer_tokens": seen + point["answer_tokens"],
             "run": before + point.get("run", 0)}
            for point in found
        ]  # fmt: skip
    return name, curve


def show(name: str, curve: list[Point]) -> None:
    """Print a table."""
    print(f"{name}\nanswer tokens    loss  accuracy at depth 0, 1, 2, 3  acceptance length")
    for point in curve:
        shares = "  ".join(f"{share:.3f}" for share in point["accuracy_by_depth"][:4])
        length = point.get("acceptance_length", "")
        print(f"{point['answer_tokens']:>13,}  {point['loss']:.3f}  {shares}  {length}")


def plot(curves: dict[str, list[Point]], output: Path) -> None:
    """Accuracy per depth, a panel a run, beside acceptance length of all where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = {name: [p for p in c if "acceptance_length" in p] for name, c in curves.items()}
    panels = len(curves) + any(measured.values())
    figure, all_axes = plt.subplots(1, panels, figsize=(4.5 * panels, 4), squeeze=False)
    for axes, (name, curve) in zip(all_axes[0], curves.items(), strict=False):
        for index, depth in enumerate(SHOWN):
            line = [(p["answer_tokens"], p["accuracy_by_depth"]) for p in curve]
            drawn = [(tokens / 1e6, at[depth]) for tokens, at in line if len(at) > depth]
            if drawn:
                shade = plt.get_cmap("viridis")(index / len(SHOWN))
                axes.plot(*zip(*drawn, strict=True), color=shade, label=f"depth {depth}")
        axes.set(title=name, xlabel="answer tokens, millions", ylim=(0, 1))
        axes.set_ylabel("share of the target's tokens predicted")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", ncols=2)
    if any(measured.values()):
        axes = all_axes[0][-1]
        for number, (name, found) in enumerate(measured.items()):
            for run in sorted({p["run"] for p in found}):
                line = [(p["answer_tokens"] / 1e6, p["acceptance_length"])
                        for p in found if p["run"] == run]  # fmt: skip
                label = name if run == found[-1]["run"] else None
                axes.plot(*zip(*line, strict=True), "o-", ms=3, color=f"C{number}", label=label)
        axes.set(title="held-out prompts", xlabel="answer tokens, millions")
        axes.set_ylabel("acceptance length")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=150)
    print(f"written: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN[,RUN...]")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of what is written")
    args = parser.parse_args()
    curves = dict[str, list[Point]]()
    for runs in args.runs:
        name, curve = join(runs)
        if name in curves:
            sys.exit(f"{runs}: another run is called {name}, too; rename the folder of one")
        curves[name] = curve
        show(name, curve)
        metrics = {"metrics": "metrics.jsonl", "points": curve}
        write_json(args.output / f"curve-{name}.json", metrics)
    plot(curves, args.output / "curves.png")


if __name__ == "__main__":
    main()
