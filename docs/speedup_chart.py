"""Draw the README's chart: throughput by method and load, relative to the target alone.

    python docs/speedup_chart.py [--output docs/figures]

From benchmarks/results/bench.json (`make bench`): the best K of each method at each number of
concurrent requests. One picture for light pages and one for dark ones; the same versions draw the
same bytes.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
NAMES = {"eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}


class Look(NamedTuple):
    """Colours of a page."""

    name: str
    ink: str
    line: str
    bars: dict[str, str]  # by method


LOOKS = (
    Look("light", "#1c2430", "#8a93a0", {"eagle3": "#e0a84e", "p-eagle": "#3b6fb6"}),
    Look("dark", "#e8ebf0", "#7d8592", {"eagle3": "#c98f35", "p-eagle": "#6ba3ec"}),
)


def speedups(report: dict[str, Any]) -> dict[int, dict[str, tuple[float, int]]]:
    """By number of requests and method: (speed-up, K) of the best K."""
    found: dict[int, dict[str, tuple[float, int]]] = {}
    base = {r["concurrency"]: r["output_tps"] for r in report["rows"] if r["method"] == "none"}
    for row in report["rows"]:
        if row["method"] == "none":
            continue
        load = row["concurrency"]
        mine = row["output_tps"] / base[load], row["k"]
        best = found.setdefault(load, {})
        best[row["method"]] = max(best.get(row["method"], mine), mine)
    return found


def draw(report: dict[str, Any], look: Look) -> Figure:
    """Groups of bars, one group for each load, with their speed-up and K."""
    found = speedups(report)
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    axes = figure.subplots()
    for side, method in zip((-0.2, 0.2), NAMES, strict=True):
        heights = [found[load][method][0] for load in found]
        places = [place + side for place in range(len(found))]
        axes.bar(places, heights, 0.36, color=look.bars[method], label=NAMES[method])
        for place, load in zip(places, found, strict=True):
            height, k = found[load][method]
            text = f"{height:.2f} ×\nK = {k}"
            axes.text(place, height + 0.02, text, ha="center", fontsize=8, color=look.ink)
    axes.axhline(1, color=look.line, linewidth=1, linestyle="--")
    axes.set(ylim=(0, 1.75), ylabel="speed-up over the target alone", xlabel="concurrent requests")
    axes.set_xticks(range(len(found)), [str(load) for load in found])
    colour(axes, look)
    axes.legend(frameon=False, labelcolor=look.ink, ncols=2, loc="upper right")
    return figure


def colour(axes: Axes, look: Look) -> None:
    """Give the axes the colours of a page; two sides are enough."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=look.ink)
    for spine in axes.spines.values():
        spine.set_color(look.line)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(look.ink)


def save(draw: Callable[[Look], Figure], output: Path, name: str) -> None:
    """Write the versions of a picture for all pages."""
    with matplotlib.rc_context({"svg.hashsalt": "peagle", "svg.fonttype": "path"}):
        for look in LOOKS:
            file = output / f"{name}-{look.name}.svg"
            draw(look).savefig(file, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "figures")
    output = parser.parse_args().output
    report = json.loads((HERE.parent / "benchmarks" / "results" / "bench.json").read_text())
    save(partial(draw, report), output, "speedup")


if __name__ == "__main__":
    main()
