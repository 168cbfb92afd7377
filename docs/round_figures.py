"""Draw the pictures of a real round in docs/how-it-works.md: lookup, correction, tree.

    python docs/round_figures.py [--record] [--output docs/figures]

`--record` decodes PROMPT with the demo target and its P-EAGLE head and writes one round of it to
docs/figures/round.json: tokens, and the head's candidates after each path. The pictures are drawn
from that file by the engine's own lookup and tree.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from figures import FOLDER, LOOKS, Look, arrow, box, canvas, label
from matplotlib.figure import Figure

from peagle import LLM, SamplingParams
from peagle.engine.corrected import CorrectedScores
from peagle.engine.lookup import Index, with_lookup
from peagle.engine.tree import Candidate, Draft, Match, grow
from peagle.engine.tree import Path as Tokens

RECORD = FOLDER / "round.json"
ROUND, NODES, SHOWN = 2, 9, 3  # the round of the answer; nodes of its tree; candidates of a row
PROMPT = """Rename `items` to `words`:
```python
def longest(items):
    best = items[0]
    for item in items:
        if len(item) > len(best):
            best = item
    return best
```"""


def record() -> dict[str, Any]:
    """Decode up to the round, and keep what it was made of."""
    llm = LLM("smollm2-135m", head="heads/smollm2-135m-p-eagle", nodes=NODES, dtype="float32")
    kept = list[CorrectedScores]()
    offers_of = CorrectedScores.offers
    CorrectedScores.offers = lambda scores: kept.append(scores) or offers_of(scores)  # type: ignore
    asked = [{"role": "user", "content": PROMPT}]
    text = llm.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    run = llm.stream([text], SamplingParams(max_tokens=64))
    [request] = run.requests
    for _ in range(ROUND):
        run.step()
    draft, scores, tokens = request.draft, kept[-1], list(request.tokens)
    [offer] = offers_of(scores)
    paths = [(), *(tuple(draft.tokens[row - 1] for row in tail) for tail in draft.tails()[1:])]
    offers = [[path, [list(each) for each in list(offer(path))[:NODES]]] for path in paths]
    calibration = llm.engine.lookups
    chances = [calibration(draft.match.size, depth) for depth in range(len(draft.match.tokens))]
    parallel = scores.candidates.logits.exp()
    alone = [
        sorted(zip(row, probs, strict=True), key=lambda each: -each[1])[:SHOWN]
        for row, probs in zip(scores.tokens, parallel.tolist(), strict=True)
    ]
    run.step()
    run.close()
    ids = {token for path, candidates in offers for token in (*path, *(c[0] for c in candidates))}
    ids |= {*tokens, *request.tokens, *draft.match.tokens, *(t for row in alone for t, _ in row)}
    return {
        "tokens": tokens,
        "emitted": request.tokens[len(tokens) :],
        "offers": offers,
        "alone": alone,
        "lookup_chances": chances,
        "tree": draft.tokens,
        "texts": {str(token): llm.tokenizer.decode([token]) for token in sorted(ids)},
    }


class Round:
    """The recorded round, its lookup and its tree made again by the engine's own code."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.tokens: list[int] = kept["tokens"]
        self.emitted: list[int] = kept["emitted"]
        self.alone: list[list[tuple[int, float]]] = kept["alone"]
        self.texts: dict[str, str] = kept["texts"]
        self.match: Match = Index().find(self.tokens, NODES - 1)
        self.offers = {
            tuple(path): [Candidate(*each) for each in candidates]
            for path, candidates in kept["offers"]
        }
        chances = kept["lookup_chances"]
        offer = with_lookup(self.head, self.match, lambda _, depth: chances[depth])  # type: ignore
        self.draft: Draft = grow(offer, NODES, self.match)
        assert sorted(self.draft.tokens) == sorted(kept["tree"]), "record it again: --record"

    def head(self, path: Tokens) -> list[Candidate]:
        """The head's candidates after a path."""
        return self.offers.get(path, [])

    def text(self, token: int) -> str:
        """A token as it is shown."""
        return self.texts[str(token)].replace("\n", "⏎").replace(" ", "·")

    def accepted(self) -> list[int]:
        """Rows of the tree along which the emitted tokens lead."""
        return self.draft.follow(self.emitted)


def lookup(look: Look, drawn: Round) -> Figure:
    """The newest tokens, their earlier occurrence, and the tokens that followed it."""
    figure, axes = canvas(9, 2.5, (-0.2, 14.6), (-0.9, 3.0))
    size, tokens = drawn.match.size, drawn.tokens
    newest = tokens[-size:]
    starts = range(len(tokens) - size)
    at = max(start for start in starts if tokens[start : start + size] == newest)
    label(axes, look, (0, 2.6), "earlier in the prompt", weight="bold")
    for i, token in enumerate(tokens[at : at + size + 6]):
        colour = look.real if i < size else look.drafted
        box(axes, look, (0.6 + 1.42 * i, 1.9), drawn.text(token), colour=colour, width=1.34, size=8)
    label(axes, look, (0, 0.9), "the newest tokens", weight="bold")
    for i, token in enumerate(newest):
        box(axes, look, (0.6 + 1.42 * i, 0.2), drawn.text(token), colour=look.real, width=1.34,
            size=8)  # fmt: skip
    for i, token in enumerate(drawn.match.tokens[:6], start=size):
        arrow(axes, look, (0.6 + 1.42 * i, 1.55), (0.6 + 1.42 * i, 0.55))
        box(axes, look, (0.6 + 1.42 * i, 0.2), drawn.text(token), colour=look.drafted, width=1.34,
            size=8, dashed=True)  # fmt: skip
    label(axes, look, (0.6 + 1.42 * (size + 2.5), -0.55), "drafted by lookup", ha="center",
          fontsize=8.5)  # fmt: skip
    return figure


def correction(look: Look, drawn: Round) -> Figure:
    """Candidates of one slot: as one pass predicts them, and after two tokens that may precede."""
    by_length = sorted(drawn.offers, key=len)
    pairs = ((a, b) for a in by_length for b in by_length if len(a) == len(b) and a[:-1] == b[:-1])
    deep = [(a, b) for a, b in pairs if a < b and drawn.offers[a] and drawn.offers[b]]
    first, second = deep[-1]
    depth = len(first)
    columns = [("one pass, whatever precedes", drawn.alone[depth])]
    for path in (first, second):
        found = [(each.token, each.prob) for each in drawn.offers[path][:SHOWN]]
        columns.append((f"corrected, after “{drawn.text(path[-1])}”", found))
    figure, axes = canvas(9, 2.1, (0, 12), (-0.3, 3.4))
    for number, (title, candidates) in enumerate(columns):
        left = 0.2 + 4 * number
        label(axes, look, (left, 3.0), title, weight="bold", fontsize=9)
        for line, (token, prob) in enumerate(candidates):
            y = 2.1 - 0.85 * line
            label(axes, look, (left + 0.9, y), drawn.text(token), ha="right", fontsize=9)
            axes.barh(y, 2 * prob, 0.5, left=left + 1.05, color=look.drafted, edgecolor=look.ink)
            label(axes, look, (left + 1.15 + 2 * prob, y), f"{prob:.2f}", fontsize=8.5)
    return figure


def places(draft: Draft) -> Iterator[tuple[int, int, float]]:
    """Row, depth and height of each node: a path keeps its height, a branch begins below."""
    heights, below = {0: 0.0}, 0.0
    first = set[int]()
    for tail in sorted(draft.tails()[1:]):
        row, parent = tail[-1], draft.parents[tail[-1] - 1]
        if parent in first:
            below -= 1
            heights[row] = below
        else:
            heights[row] = heights[parent]
        first.add(parent)
        yield row, len(tail), heights[row]


def tree(look: Look, drawn: Round) -> Figure:
    """The tree of the round: chance of each path, source, and what the target accepted."""
    draft, accepted = drawn.draft, drawn.accepted()
    found = {row: (1.5 * depth, height) for row, depth, height in places(draft)}
    found[0] = (0.0, 0.0)
    lowest = min(height for _, height in found.values())
    deepest = max(x for x, _ in found.values())
    figure, axes = canvas(9, 0.72 * (3.0 - lowest), (-0.8, deepest + 2.3), (lowest - 1.2, 1.1))
    for row, (x, y) in found.items():
        token = drawn.tokens[-1] if row == 0 else draft.tokens[row - 1]
        if row:
            px, py = found[draft.parents[row - 1]]
            arrow(axes, look, (px + 0.62, py), (x - 0.62, y))
            label(axes, look, (x, y - 0.47), f"{draft.chances[row - 1]:.2f}", ha="center",
                  fontsize=8)  # fmt: skip
        colour = look.real if row == 0 else look.drafted if row in accepted else "none"
        box(axes, look, (x, y), drawn.text(token), colour=colour, width=1.22, size=8.5,
            dashed=bool(row) and draft.source(row) == "lookup")  # fmt: skip
    x, y = found[accepted[-1]] if accepted else found[0]
    own = drawn.emitted[len(accepted)]
    arrow(axes, look, (x + 0.62, y), (x + 0.88, y))
    box(axes, look, (x + 1.5, y), drawn.text(own), colour=look.target, width=1.22, size=8.5)
    legend = "filled: accepted;  dashed: only lookup offered it;  last: the target's own token"
    label(axes, look, (deepest / 2 + 0.7, lowest - 1.0), legend, ha="center", fontsize=8.5)
    label(axes, look, (-0.6, 0.8), "newest token", fontsize=8.5)
    return figure


PICTURES = {"lookup": lookup, "correction": correction, "tree": tree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--record", action="store_true", help="decode the round again")
    chosen = parser.parse_args()
    if chosen.record:
        RECORD.write_text(json.dumps(record(), ensure_ascii=False, indent=1) + "\n")
    drawn = Round(json.loads(RECORD.read_text()))
    matplotlib.rcParams["svg.hashsalt"] = "peagle"
    for name, draw in PICTURES.items():
        for look in LOOKS:
            file = chosen.output / f"{name}-{look.name}.svg"
            draw(look, drawn).savefig(
                file, transparent=True, metadata={"Date": None, "Creator": None}
            )


if __name__ == "__main__":
    main()
