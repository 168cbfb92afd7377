"""Random batches of chains and draft trees, and attention over them by its definition."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.backends.batch import BLOCK, Span
from peagle.model.attention import AttentionSpec, HeadShape


class Rows(NamedTuple):
    """Rows of one request in one forward, and the tokens that each row sees."""

    span: Span
    visible: list[list[tuple[str, int]]]  # ("token", position) or ("row", index), by position

    @property
    def positions(self) -> list[int]:
        """RoPE positions: as many as a row sees, but for itself."""
        return [len(seen) - 1 for seen in self.visible]


def chain(blocks: Sequence[int], start: int, count: int) -> Rows:
    """Tokens in order."""
    past = [("token", at) for at in range(start)]
    visible = [past + [("row", i) for i in range(row + 1)] for row in range(count)]
    return Rows(Span(blocks, start, list(range(5, 5 + count))), visible)


def tree(blocks: Sequence[int], start: int, parents: Sequence[int]) -> Rows:
    """The newest token, and draft tokens: row i + 1 goes on with row parents[i] ≤ i."""
    tails = [list[int]()]
    for row, parent in enumerate(parents, start=1):
        tails.append([*tails[parent], row])
    past = [("token", at) for at in range(start)]
    visible = [[*past, ("row", 0), *(("row", i) for i in tail)] for tail in tails]
    return Rows(Span(blocks, start, list(range(5, 6 + len(parents))), tails), visible)


def random_parents(chance: random.Random, count: int) -> list[int]:
    return [chance.randint(max(0, row - 4), row) for row in range(count)]


def random_rows(chance: random.Random, pool: int) -> list[Rows]:
    """Some requests on blocks of their own that lie anywhere: prompts, drafts and trees."""
    free, found = chance.sample(range(pool), pool), list[Rows]()
    for _ in range(chance.randint(1, 5)):
        start = chance.choice([0, chance.randint(1, 15), chance.randint(16, 50)])
        count = chance.choice([1, chance.randint(2, 9), chance.randint(10, 30)])
        needed = -(-(start + count) // BLOCK) + chance.randint(0, 1)  # one more than it fills
        if needed > len(free):
            break
        blocks, free = free[:needed], free[needed:]
        if chance.random() < 0.5:
            found.append(chain(blocks, start, count))
        else:
            found.append(tree(blocks, start, random_parents(chance, count - 1)))
    return found


class Keys(NamedTuple):
    """Queries, keys and values: of tokens that were run before, and of the rows."""

    past: list[tuple[Tensor, Tensor]]  # of each request (start, M, ·)
    q: Tensor  # (T, N, H)
    k: Tensor  # (T, M, H)
    v: Tensor  # (T, M, HV)


def random_keys(rows: list[Rows], heads: int, shape: HeadShape, seed: int) -> Keys:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, wide: int, size: int) -> Tensor:
        return torch.randn(count, wide, size, generator=generator)

    kv_heads, size, wide = shape
    past = [
        (draw(one.span.start, kv_heads, size), draw(one.span.start, kv_heads, wide)) for one in rows
    ]
    total = sum(len(one.visible) for one in rows)
    q, k = draw(total, heads, size), draw(total, kv_heads, size)
    return Keys(past, q, k, draw(total, kv_heads, wide))


def by_definition(rows: list[Rows], keys: Keys, spec: AttentionSpec) -> Tensor:
    """Row by row, head by head, in float64, under each row's own list of what it sees."""
    out, first = list[Tensor](), 0
    for one, (past_k, past_v) in zip(rows, keys.past, strict=True):
        own = slice(first, first + len(one.visible))
        k = torch.cat([past_k, keys.k[own]]).double()
        v = torch.cat([past_v, keys.v[own]]).double()
        for q, seen in zip(keys.q[own].double(), one.visible, strict=True):
            at = [i + (one.span.start if kind == "row" else 0) for kind, i in seen]
            out.append(_attend(q, k[at[-spec.window :] if spec.window else at], v, at, spec))
        first = own.stop
    return torch.stack(out).float()


def _attend(q: Tensor, k: Tensor, v: Tensor, at: list[int], spec: AttentionSpec) -> Tensor:
    """One row (N, H); the positions that a row sees follow each other, so a window is the last."""
    v = v[at][-len(k) :]
    groups = len(q) // k.shape[1]
    heads = list[Tensor]()
    for head, query in enumerate(q):
        scores = k[:, head // groups] @ query * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.sinks is not None:
            scores = torch.cat([scores, spec.sinks[head : head + 1].double()])
        weights = scores.softmax(-1)[: len(k)]
        heads.append(weights @ v[:, head // groups])
    return torch.stack(heads)
