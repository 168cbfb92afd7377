"""Draft trees: what is proposed for a request, and how the target's choices lead through it.

No torch here. A row is what the target runs: row 0 is the request's newest token, node i of the
tree is row i + 1.

Example. The newest token is "the". At depth 0 the head offers cat (0.6) and dog (0.3), at depth 1
sat (0.7) and ran (0.2), whatever is at depth 0. `grow` with 4 nodes takes the likeliest paths:

| row | token | parent | chance of the path |
|-----|-------|--------|--------------------|
| 1   | cat   | 0      | 0.6                |
| 2   | sat   | 1      | 0.6 · 0.7 = 0.42   |
| 3   | dog   | 0      | 0.3                |
| 4   | sat   | 3      | 0.3 · 0.7 = 0.21   |

The target chooses a token for every row: dog for row 0, sat for row 3, down for row 4. The path is
rows 3 and 4. So "dog sat" is accepted, and "down" is the target's own next token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

Source = Literal["target", "head", "lookup"]  # origin of a token; lookup: no head offered it


class Match(NamedTuple):
    """The newest tokens of a request occurred before (lookup.py)."""

    size: int = 0  # number of these tokens; 0: no match
    tokens: tuple[int, ...] = ()  # the tokens that followed


@dataclass(slots=True)
class Draft:
    """Tokens that may follow a request's newest one. Parents are listed before their children."""

    tokens: list[int] = field(default_factory=list)  # target ids
    parents: list[int] = field(default_factory=list)  # the row of each node's parent
    probs: list[float] = field(default_factory=list)  # the head's, given the parent; 0: lookup's
    chances: list[float] = field(default_factory=list)  # that all of the path is accepted
    match: Match = Match()  # the tokens that lookup found

    def add(self, parent: int, token: int, prob: float, chance: float) -> None:
        """Add a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.chances.append(chance)

    def __len__(self) -> int:
        return len(self.tokens)

    def source(self, row: int) -> Source:
        """The origin of the node of a row."""
        return "head" if self.probs[row - 1] else "lookup"

    @property
    def is_chain(self) -> bool:
        """No row has two children, so the rows' positions are consecutive."""
        return self.parents == list(range(len(self)))

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        return max(self.depths())

    def depths(self) -> list[int]:
        """The number of nodes on the path to each row, its own included: 0 for row 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def tails(self) -> list[list[int]]:
        """The rows on the path to each row, row 0 left out and its own included."""
        tails = [list[int]()]
        for row, parent in enumerate(self.parents, start=1):
            tails.append([*tails[parent], row])
        return tails

    def path(self, chosen: Sequence[int]) -> list[int]:
        """The accepted rows, by the token that the target chose for each row."""
        path = [0]
        for row, parent in enumerate(self.parents, start=1):
            if parent == path[-1] and self.tokens[row - 1] == chosen[parent]:
                path.append(row)
        return path[1:]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The rows that these tokens lead along, as far as the tree has them."""
        chosen = [tokens[depth] if depth < len(tokens) else -1 for depth in self.depths()]
        return self.path(chosen)

    def first(self, count: int) -> "Draft":
        """The first `count` nodes, with their likeliest chain listed before all others. The chain's
        keys and values need not move if it is accepted."""
        rows = range(1, min(count, len(self)) + 1)
        chain = [0]
        for row in rows:
            if self.parents[row - 1] == chain[-1]:  # the first child is the likeliest one
                chain.append(row)
        listed = Draft(match=self.match)
        new_row = {0: 0}  # by old row
        for row in sorted(rows, key=lambda row: row not in chain):  # the order else is kept
            node = row - 1
            parent = new_row[self.parents[node]]
            listed.add(parent, self.tokens[node], self.probs[node], self.chances[node])
            new_row[row] = len(listed)
        return listed


class Candidate(NamedTuple):
    """A token that may follow a path."""

    token: int
    prob: float = 1.0  # the head's; 0: only lookup proposes it
    chance: float = 1.0  # that it is accepted if the path is


Path = tuple[int, ...]  # tokens of the nodes below row 0
Chance = Callable[[int, float], float]  # chance of a candidate, by its depth from 0 and its prob
Offer = Callable[[Path], Iterable[Candidate]]  # candidates after a path, likeliest first


@dataclass(frozen=True, slots=True)
class Ranked:
    """A head's tokens after a path, likeliest first. Few are read: candidates are made then."""

    tokens: Sequence[int]
    probs: Sequence[float]
    depth: int
    chance: Chance

    def __iter__(self) -> Iterator[Candidate]:
        for token, prob in zip(self.tokens, self.probs, strict=True):
            if prob > 0:  # of logits that are all NaN or refused it is NaN
                yield Candidate(token, prob, self.chance(self.depth, prob))


def along(chain: Sequence[Candidate]) -> Offer:
    """One candidate after another: each follows the ones before it only."""
    tokens = tuple(node.token for node in chain)
    paths = {tokens[:depth]: (node,) for depth, node in enumerate(chain)}
    return lambda path: paths.get(path, ())


def grow(offer: Offer, count: int, match: Match = Match(), min_chance: float = 0.0) -> Draft:  # noqa: B008 (immutable)
    """The tree of the `count` likeliest nodes whose path has a chance of `min_chance` or more. Its
    nodes are sorted by this chance, which is the product of the chances along the path.

    Best first: a path is never likelier than its own beginning. So the likeliest node whose parent
    is in the tree is the likeliest of all that are left (DDTree, arXiv 2604.12989).
    """
    draft = Draft(match=match)
    paths: list[Path] = [()]  # to each row
    chances = [1.0]  # chances of these paths
    offers = [iter(offer(()))]  # what may follow each row, and is not in the heap yet
    heap = list[tuple[float, int, Candidate]]()  # −chance of the path, parent's row; one of a row

    def push(row: int) -> None:
        node = next(offers[row], None)
        if node and chances[row] * node.chance >= min_chance:
            heappush(heap, (-chances[row] * node.chance, row, node))

    push(0)
    while heap and len(draft) < count:
        negative, row, node = heappop(heap)
        draft.add(row, node.token, node.prob, -negative)
        if len(draft) == count:
            break
        paths.append((*paths[row], node.token))
        chances.append(-negative)
        offers.append(iter(offer(paths[-1])))
        push(row)
        push(len(draft))
    return draft
