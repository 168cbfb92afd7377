"""Draft trees: what is proposed for a request, and how the target's choices lead through it.

No torch here. A row is what the target runs: row 0 is the request's newest token, node i of the
tree is row i + 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

Source = Literal["target", "head", "lookup"]  # of a token; lookup: no head offered it


class Match(NamedTuple):
    """The newest tokens of a request occurred before (lookup.py)."""

    size: int = 0  # how many of them; 0: they did not
    tokens: tuple[int, ...] = ()  # what followed


@dataclass(slots=True)
class Draft:
    """Tokens that may follow a request's newest one, likeliest paths first, so that parents stand
    before their children."""

    tokens: list[int] = field(default_factory=list)  # target ids
    parents: list[int] = field(default_factory=list)  # the row of each node's parent
    probs: list[float] = field(default_factory=list)  # the head's, given the parent; 0: lookup's
    chances: list[float] = field(default_factory=list)  # that all of the path is accepted
    match: Match = Match()  # what lookup added

    def add(self, parent: int, token: int, prob: float, chance: float) -> None:
        """Add a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.chances.append(chance)

    def __len__(self) -> int:
        return len(self.tokens)

    def source(self, row: int) -> Source:
        """What offered the node of a row."""
        return "head" if self.probs[row - 1] else "lookup"

    @property
    def is_chain(self) -> bool:
        """Rows stand at positions that follow each other."""
        return self.parents == list(range(len(self)))

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        return max(map(len, self.tails()))

    def tails(self) -> list[list[int]]:
        """Of each row, its ancestors' rows below row 0, itself last."""
        tails = [list[int]()]
        for row, parent in enumerate(self.parents, start=1):
            tails.append([*tails[parent], row])
        return tails

    def children(self) -> dict[tuple[int, int], int]:
        """The row of each node, by its parent's row and its token."""
        nodes = enumerate(zip(self.parents, self.tokens, strict=True), start=1)
        return {node: row for row, node in nodes}

    def path(self, chosen: Sequence[int]) -> list[int]:
        """The rows below row 0 that the target's choice for each row leads to."""
        children = self.children()
        path, row = list[int](), 0
        while row := children.get((row, chosen[row]), 0):
            path.append(row)
        return path

    def looked_up(self) -> list[int]:
        """The rows of the path that lookup knows."""
        children = self.children()
        rows, row = list[int](), 0
        for token in self.match.tokens:
            if (row := children.get((row, token), 0)) == 0:
                break
            rows.append(row)
        return rows

    def first(self, count: int) -> "Draft":
        """The first `count` nodes, the likeliest chain of them before all others: what is accepted
        of it lies where it stays."""
        rows, chain, last = range(1, min(count, len(self)) + 1), list[int](), 0
        for row in rows:
            if self.parents[row - 1] == last:  # of siblings the likeliest stands first
                chain.append(row)
                last = row
        place, made = {0: 0}, Draft(match=self.match)
        for row in [*chain, *sorted(set(rows) - set(chain))]:
            node = row - 1
            made.add(
                place[self.parents[node]], self.tokens[node], self.probs[node], self.chances[node]
            )
            place[row] = len(made)
        return made


class Candidate(NamedTuple):
    """A token that may follow a path."""

    token: int
    prob: float = 1.0  # the drafter's
    chance: float = 1.0  # that it is accepted where the path is


Path = tuple[int, ...]  # tokens below row 0
Chance = Callable[[int, float], float]  # of a candidate, by its depth from 0 and its prob
Offer = Callable[[Path], Sequence[Candidate]]  # what may follow a path, likeliest first


def along(chain: Sequence[Candidate]) -> Offer:
    """One token after another."""
    tokens = tuple(node.token for node in chain)

    def offer(path: Path) -> Sequence[Candidate]:
        at = len(path)
        return chain[at : at + 1] if tokens[:at] == path else []

    return offer


def grow(offer: Offer, count: int, match: Match = Match()) -> Draft:  # noqa: B008 (immutable)
    """The tree of the `count` likeliest nodes: the chances along a path are multiplied.

    Best first: a path is never likelier than its own beginning, so the likeliest node that may be
    taken next is the likeliest of all that are left (DDTree, arXiv 2604.12989).
    """
    draft = Draft(match=match)
    paths: list[tuple[Path, float]] = [((), 1.0)]  # of each row: its tokens, the chance of all
    offers = [offer(())]
    heap = list[tuple[float, int, int]]()  # −chance of the path, parent's row, which of its offers

    def push(row: int, which: int) -> None:
        if which < len(offers[row]):
            heappush(heap, (-paths[row][1] * offers[row][which].chance, row, which))

    push(0, 0)
    while heap and len(draft) < count:
        negative, row, which = heappop(heap)
        node = offers[row][which]
        draft.add(row, node.token, node.prob, -negative)
        paths.append(((*paths[row][0], node.token), -negative))
        offers.append(offer(paths[-1][0]) if len(draft) < count else [])
        push(row, which + 1)
        push(len(draft), 0)
    return draft
