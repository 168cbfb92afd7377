"""`peagle generate --show-tree`: the draft of every round as text, on stderr."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import typer

from peagle.engine.llm import LLM
from peagle.engine.request import Chunk
from peagle.engine.run import Run
from peagle.engine.tree import Draft

LEGEND = "a line a node: token, chance that all up to it is accepted, source; ✓ accepted"
ALONE = "no drafts: the target decodes alone"


class Node(NamedTuple):
    """A node as it is shown."""

    depth: int  # from 0
    token: int
    chance: float
    source: str
    accepted: bool


def show_trees(llm: LLM, run: Run) -> list[Chunk]:
    """Decode the one request of `run`, and write the draft tree of every round to stderr. Returns
    what was emitted."""
    chunks, number = list[Chunk](), 0
    [request] = run.requests

    def text(tokens: list[int]) -> str:
        return " ".join(json.dumps(llm.tokenizer.decode(t), ensure_ascii=False) for t in tokens)

    typer.echo(ALONE if llm.drafting.method == "none" else LEGEND, err=True)
    with closing(run):
        while request.finish_reason is None:
            known, draft = len(request.tokens), request.draft
            chunks += run.step()
            emitted = request.tokens[known:]
            if not emitted or llm.drafting.method == "none":
                continue
            name = f"round {number}" if number else "prompt"
            number += 1
            _write(name, draft, emitted, text)
    return chunks


def _write(name: str, draft: Draft, emitted: list[int], text: Callable[[list[int]], str]) -> None:
    """A line for the round, and one for each node."""
    shown = list(nodes(draft, emitted))
    accepted = sum(node.accepted for node in shown)
    said = f"{len(shown)} drafted, {accepted} accepted" if shown else "no draft"
    rest = emitted[accepted:]
    then = f", then {text(rest)}" if rest else ""
    typer.echo(f"{name}: {said}{then}", err=True)
    for node in shown:
        mark, colour = ("✓", "green") if node.accepted else ("·", None)
        indent = "  " * node.depth
        line = f"{mark} {indent}{text([node.token])}  {node.chance:.2f}  {node.source}"
        typer.secho(line, err=True, fg=colour)


def nodes(draft: Draft, emitted: Sequence[int]) -> Iterator[Node]:
    """The nodes of a draft, each before its children; the emitted tokens lead along those that were
    accepted."""
    children = draft.children()
    accepted, row = set[int](), 0
    for token in emitted:
        if (row := children.get((row, token), 0)) == 0:
            break
        accepted.add(row)
    below = defaultdict[int, list[int]](list)
    for row, parent in enumerate(draft.parents, start=1):
        below[parent].append(row)
    left = [(0, row) for row in reversed(below[0])]
    while left:
        depth, row = left.pop()
        token, chance = draft.tokens[row - 1], draft.chances[row - 1]
        yield Node(depth, token, chance, draft.source(row), row in accepted)
        left += [(depth + 1, child) for child in reversed(below[row])]
