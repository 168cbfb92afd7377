"""Learning curve of a training run: loss and accuracy per depth against answer tokens seen.

python benchmarks/learning_curve.py runs/p-eagle/metrics.jsonl benchmarks/results/curve-p-eagle.json
"""

import json
import sys
from pathlib import Path

WINDOW = 25_000  # answer tokens a point


def points(lines: list[dict]) -> list[dict]:
    """Means over windows of the training tokens."""
    windows: dict[int, list[dict]] = {}
    for line in lines:
        windows.setdefault((line["answer_tokens"] - 1) // WINDOW, []).append(line)
    return [_mean(windows[key]) for key in sorted(windows)]


def _mean(lines: list[dict]) -> dict:
    depths = max(len(line["accuracy"]) for line in lines)
    at = [
        [line["accuracy"][d] for line in lines if len(line["accuracy"]) > d] for d in range(depths)
    ]
    return {
        "answer_tokens": lines[-1]["answer_tokens"],
        "loss": round(sum(line["loss"] for line in lines) / len(lines), 4),
        "accuracy_by_depth": [round(sum(values) / len(values), 4) for values in at],
    }


def main(metrics: Path, output: Path) -> None:
    """Read metrics.jsonl, print a table, write JSON."""
    curve = points([json.loads(line) for line in metrics.read_text().splitlines()])
    print("answer tokens    loss  accuracy at depth 0, 1, 2, 3")
    for point in curve:
        shares = "  ".join(f"{share:.3f}" for share in point["accuracy_by_depth"][:4])
        print(f"{point['answer_tokens']:>13,}  {point['loss']:.3f}  {shares}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"metrics": metrics.name, "points": curve}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
