"""Draw the schemes of docs/how-it-works.md, each for light and for dark pages.

    python docs/figures.py [--output docs/figures]

Elements, mask and segments are those of the trainer's own code, so the pictures cannot disagree
with it. The same versions draw the same bytes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from peagle.train.attention import sees
from peagle.train.elements import Segment, partition, sample_elements

FOLDER = Path(__file__).parent / "figures"
PROMPT, TOKENS, DEPTHS, RATIO = 4, 12, 4, 0.7  # the sequence that is drawn


class Look(NamedTuple):
    """Colours of light or dark pages."""

    name: str
    ink: str
    dim: str  # lines, and what is left out
    real: str  # tokens and features that exist
    placeholder: str
    drafted: str
    target: str


LOOKS = (
    Look("light", "#1c2430", "#b9c0ca", "#cfe1f7", "#fbe3c0", "#cdeccf", "#e3d7f4"),
    Look("dark", "#e8ebf0", "#59606d", "#254a73", "#7a5113", "#27602c", "#543a80"),
)


def box(axes: Axes, look: Look, at: tuple[float, float], text: str, **how: Any) -> None:
    """A rounded box with its centre at `at`; `how`: colour, width, height, dashed."""
    width, height = how.get("width", 0.9), how.get("height", 0.62)
    corner = (at[0] - width / 2, at[1] - height / 2)
    dashed = "--" if how.get("dashed") else "-"
    axes.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle="round,pad=0,rounding_size=0.08", linewidth=1.1,
            facecolor=how.get("colour", "none"), edgecolor=look.ink, linestyle=dashed,
        )
    )  # fmt: skip
    axes.text(*at, text, ha="center", va="center", color=look.ink, fontsize=how.get("size", 9.5))


def arrow(axes: Axes, look: Look, start: tuple[float, float], end: tuple[float, float]) -> None:
    how = {"arrowstyle": "-|>", "color": look.ink, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=how)


def label(axes: Axes, look: Look, at: tuple[float, float], text: str, **how: Any) -> None:
    axes.text(*at, text, **{"color": look.ink, "fontsize": 9.5, "va": "center", **how})


def canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> Any:
    """An empty figure in data coordinates of one unit a box."""
    figure = Figure((width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    return figure, axes


def slots(look: Look) -> Figure:
    """Inputs and outputs of the drafter after x0 … x4, K = 4."""
    figure, axes = canvas(9, 4.1, (-2.1, 7.1), (-1.25, 3.6))
    rows = ("position", "feature in", "token in", "predicts")
    for y, name in enumerate(rows):
        label(axes, look, (-0.75, y), name, ha="right", weight="bold")
    for slot in range(7):
        real = slot <= 3
        colour = look.real if real else look.placeholder
        label(axes, look, (slot, 0), str(slot), ha="center")
        box(axes, look, (slot, 1), f"h{slot}" if real else "mask_hidden", colour=colour,
            size=9.5 if real else 7.5)  # fmt: skip
        box(axes, look, (slot, 2), f"x{slot + 1}" if real else "mask token", colour=colour,
            size=9.5 if real else 7.5)  # fmt: skip
        if slot < 3:
            label(axes, look, (slot, 3), "(context)", ha="center", fontsize=8)
        else:
            arrow(axes, look, (slot, 2.31), (slot, 2.69))
            box(axes, look, (slot, 3), f"x{slot + 2}", colour=look.drafted)
    axes.plot([3.5, 3.5], [-0.35, 3.4], color=look.dim, linestyle=":", linewidth=1.4)
    label(axes, look, (1.5, -0.75), "verified: real tokens and features", ha="center")
    label(axes, look, (5, -0.75), "not known yet: placeholders", ha="center")
    return figure


def passes(look: Look) -> Figure:
    """EAGLE-3's K drafter passes and P-EAGLE's one, K = 4."""
    figure, axes = canvas(9, 4.4, (-1.5, 11.3), (-0.9, 5.2))
    label(axes, look, (-1.35, 4.75), "EAGLE-3: K passes of the drafter, one after another",
          weight="bold")  # fmt: skip
    for i in range(4):
        x = 0.1 + 2.1 * i
        colour = look.real if i == 0 else look.drafted
        box(axes, look, (x, 2.75), "x4, h3" if i == 0 else f"x{4 + i}, own\nhidden state",
            colour=colour, width=1.7, height=0.66, size=8)  # fmt: skip
        box(axes, look, (x, 3.55), f"pass {i + 1}", width=1.7, height=0.5)
        box(axes, look, (x, 4.25), f"x{5 + i}", colour=look.drafted, width=0.8, height=0.44)
        arrow(axes, look, (x, 3.09), (x, 3.29))
        arrow(axes, look, (x, 3.81), (x, 4.02))
        if i < 3:
            arrow(axes, look, (x + 0.41, 4.25), (x + 1.24, 2.95))
    verify(axes, look, 9.9, 3.5)
    label(axes, look, (-1.35, 1.75), "P-EAGLE: one pass", weight="bold")
    box(axes, look, (3.25, 0.55), "pass 1", width=8.0, height=0.5)
    for i in range(4):
        x = 0.1 + 2.1 * i
        text, colour = ("x4, h3", look.real) if i == 0 else ("placeholders", look.placeholder)
        box(axes, look, (x, -0.3), text, colour=colour, width=1.7, height=0.5, size=8)
        box(axes, look, (x, 1.25), f"x{5 + i}", colour=look.drafted, width=0.8, height=0.44)
        arrow(axes, look, (x, -0.04), (x, 0.29))
        arrow(axes, look, (x, 0.81), (x, 1.02))
    verify(axes, look, 9.9, 0.55)
    return figure


def verify(axes: Axes, look: Look, x: float, y: float) -> None:
    arrow(axes, look, (x - 2.35 if y > 2 else x - 2.6, y), (x - 1.3, y))
    box(axes, look, (x, y), "the target verifies\nin one pass", colour=look.target, width=2.5,
        height=0.95, size=8.5)  # fmt: skip


def verification(look: Look) -> Figure:
    """Verification of four draft tokens: two are accepted, and the target adds one."""
    figure, axes = canvas(9, 3.5, (-2.5, 5.6), (-0.9, 3.45))
    rows = ((0, "the target reads"), (1, "the target outputs"), (2, "draft token"), (3, "emitted"))
    for y, name in rows:
        label(axes, look, (-0.75, y), name, ha="right", weight="bold")
    outputs = ("x5", "x6", "x7", "x8", "x9")
    read = ("x4", "d1", "d2", "d3", "d4")
    draft = ("d1 = x5", "d2 = x6", "d3 ≠ x7", "d4", "")
    for i in range(5):
        late = i > 2
        box(axes, look, (i, 0), read[i], colour=look.real if i == 0 else look.drafted, dashed=late)
        arrow(axes, look, (i, 0.33), (i, 0.67))
        box(axes, look, (i, 1), "·" if late else outputs[i], colour="none" if late else look.target,
            dashed=late)  # fmt: skip
        if draft[i]:
            box(axes, look, (i, 2), draft[i], colour=look.drafted if i < 2 else "none",
                dashed=i >= 2, size=8.5)  # fmt: skip
        if i < 3:
            box(axes, look, (i, 3), outputs[i], colour=look.drafted if i < 2 else look.target)
    label(axes, look, (3.6, 3), "two accepted, one by the target", fontsize=8.5, ha="center")
    label(axes, look, (2, -0.7), "rows after the first wrong draft token are discarded",
          ha="center", fontsize=8.5)  # fmt: skip
    return figure


def drawn() -> tuple[Segment, torch.Tensor, torch.Tensor]:
    """Elements, documents and answer tokens of the sequence in the next three pictures."""
    answer, documents = torch.arange(TOKENS) >= PROMPT, torch.zeros(TOKENS, dtype=torch.int64)
    draws = torch.Generator().manual_seed(3)
    return sample_elements(answer, documents, DEPTHS, RATIO, draws), documents, answer


def elements(look: Look) -> Figure:
    """Elements that COD keeps: anchors across, depths up."""
    (kept, _), _, answer = drawn()
    pairs = set(zip(kept.anchor.tolist(), kept.depth.tolist(), strict=True))
    figure, axes = canvas(9, 3.9, (-2.1, TOKENS + 0.4), (-1.75, DEPTHS - 0.3))
    for depth in range(DEPTHS):
        label(axes, look, (-0.8, depth), f"depth {depth}", ha="right")
        for anchor in range(TOKENS - 1):
            if anchor + depth + 2 > TOKENS:
                continue
            inside, trained = (anchor, depth) in pairs, False
            if anchor + depth + 2 < TOKENS:
                trained = bool(answer[anchor + depth + 2])
            if not inside and not trained:
                continue
            filled = look.real if depth == 0 else look.placeholder
            text = f"→ x{anchor + depth + 2}" if trained and inside else ""
            box(axes, look, (anchor, depth), text, colour=filled if inside else "none",
                dashed=not inside, size=7, width=0.86)  # fmt: skip
    for anchor in range(TOKENS - 1):
        label(axes, look, (anchor, -0.75), str(anchor), ha="center")
    label(axes, look, (-0.8, -0.75), "anchor", ha="right")
    label(axes, look, ((TOKENS - 2) / 2, -1.35),
          f"tokens 0 … {PROMPT - 1}: prompt;  {PROMPT} … {TOKENS - 1}: answer;  "
          "dashed: dropped this time", ha="center", fontsize=8.5)  # fmt: skip
    return figure


def mask(look: Look) -> Figure:
    """The attention mask of the same elements."""
    (kept, _), documents, _ = drawn()
    count = len(kept.anchor)
    each = torch.arange(count)
    seen = sees(kept, documents[kept.anchor], None, each[:, None], each)
    figure = Figure((7.2, 7.2))
    axes = figure.add_axes((0.11, 0.02, 0.87, 0.87))
    depths = kept.depth.tolist()
    for row, column in seen.nonzero().tolist():
        colour = look.real if depths[column] == 0 else look.placeholder
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor=look.dim,
                                 linewidth=0.4))  # fmt: skip
    names = [f"{a},{d}" for a, d in zip(kept.anchor.tolist(), depths, strict=True)]
    axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal")
    places = [i + 0.5 for i in range(count)]
    axes.set_xticks(places, names, fontsize=7, rotation=90, color=look.ink)
    axes.set_yticks(places, names, fontsize=7, color=look.ink)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xlabel("is seen (anchor,depth)", color=look.ink)
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("sees", color=look.ink)
    for depth in range(1, DEPTHS):
        edge = depths.index(depth)
        axes.axhline(edge, color=look.ink, linewidth=0.9)
        axes.axvline(edge, color=look.ink, linewidth=0.9)
    for spine in axes.spines.values():
        spine.set_color(look.ink)
    return figure


def segments(look: Look) -> Figure:
    """The same elements in two passes: trained ones filled, context outlined."""
    whole, documents, _ = drawn()
    parts = partition(whole, documents, 2)
    figure, axes = canvas(9, 2.9, (-1.2, 2 * TOKENS + 1.2), (-1.6, DEPTHS + 0.6))
    for number, part in enumerate(parts):
        left = number * (TOKENS + 0.9)
        label(axes, look, (left + (TOKENS - 2) / 2, DEPTHS + 0.1), f"pass {number + 1}",
              ha="center", weight="bold")  # fmt: skip
        rows = zip(*(x.tolist() for x in (*part.elements, part.trained)), strict=True)
        for anchor, depth, own in rows:
            colour = (look.real if depth == 0 else look.placeholder) if own else "none"
            box(axes, look, (left + anchor, depth), "", colour=colour, dashed=not own, width=0.8,
                height=0.7)  # fmt: skip
        for anchor in range(TOKENS - 1):
            label(axes, look, (left + anchor, -0.8), str(anchor), ha="center", fontsize=8)
    for depth in range(DEPTHS):
        label(axes, look, (-0.65, depth), str(depth), ha="right", fontsize=8)
    label(axes, look, (TOKENS, -1.35), "filled: trained in this pass;  dashed: context",
          ha="center", fontsize=8.5)  # fmt: skip
    return figure


PICTURES: dict[str, Callable[[Look], Figure]] = {
    "slots": slots,
    "passes": passes,
    "verification": verification,
    "elements": elements,
    "mask": mask,
    "segments": segments,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pictures")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "peagle"  # ids that do not change from run to run
    for name, draw in PICTURES.items():
        for look in LOOKS:
            file = output / f"{name}-{look.name}.svg"
            draw(look).savefig(file, transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
