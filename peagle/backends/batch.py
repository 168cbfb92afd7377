"""The rows of one forward, of several requests, and the keys that each row sees.

Shapes: T rows, B requests, P blocks of the longest request, L slots of the longest tail.

A block holds BLOCK tokens of one request. A *slot* holds one token: slot s is token
s % BLOCK of block s // BLOCK. The token of a request at position p is in slot
`block_table[p // BLOCK] * BLOCK + p % BLOCK`.

A draft tree has several rows for one position, so its rows do not lie in order of position. Each
has a *tail*: the slots of its ancestors after the newest verified token, its own slot last. For the
newest token x at position m, and the tree x → a, x → b, b → c:

| row | position | slot of position | tail                 | sees                     |
|-----|----------|------------------|----------------------|--------------------------|
| x   | m        | m                | none                 | positions 0 … m          |
| a   | m + 1    | m + 1            | m + 1                | positions 0 … m, a       |
| b   | m + 1    | m + 2            | m + 2                | positions 0 … m, b       |
| c   | m + 2    | m + 3            | m + 2, m + 3         | positions 0 … m, b, c    |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16  # tokens of a block


class Span(NamedTuple):
    """Rows of one request: tokens at positions start, start + 1, …, or a draft tree."""

    blocks: Sequence[int]  # the request's block table, from its first token on
    start: int  # position of the first row
    ids: Sequence[int]  # a token id for each row
    tails: Sequence[Sequence[int]] = ()  # in a tree: rows of each row's ancestors, itself last


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward, one request after another.

    All tensors are int64 and on the CPU, but for `ids`, which may be on the model's device.
    Row r at position p, whose tail has t slots, attends to positions 0 … p − t of its request
    through the block table, then to its tail.
    """

    ids: Tensor  # (T,) token ids
    positions: Tensor  # (T,) RoPE positions
    slot_mapping: Tensor  # (T,) slot where the row's keys and values are kept
    block_tables: Tensor  # (B, P) blocks of each request, 0 after its last
    query_lens: Tensor  # (B,) rows of each request
    seq_lens: Tensor  # (B,) positions that its rows reach through the block table
    tails: Tensor | None = None  # (T, L) slots (in `Span` rows), −1 after the last; None: no trees

    @classmethod
    def of(cls, spans: Sequence[Span], ids: Tensor | None = None) -> "Batch":
        """Pack spans. `ids` (T,) replaces the spans' own ids when those are on a GPU.

        Raises ValueError for a tree whose rows and tails differ in number.
        """
        tokens = list[int]()
        positions = list[int]()
        slots = list[int]()
        for span in spans:
            count = len(span.ids)
            if span.tails and len(span.tails) != count:
                raise ValueError(f"{len(span.tails)} tails for {count} rows")
            tokens += span.ids
            slots += slots_of(span.blocks, span.start, count)
            in_order = range(span.start, span.start + count)
            positions += [span.start + len(tail) for tail in span.tails] or in_order
        if ids is None:
            ids = torch.tensor(tokens)
        # Through the block table, the rows of a tree reach as far as its root does.
        reached = [span.start + (1 if span.tails else len(span.ids)) for span in spans]
        tables = [span.blocks[: blocks_of(span.start + len(span.ids))] for span in spans]
        return cls(
            ids,
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=_padded(tables, 0),
            query_lens=torch.tensor([len(span.ids) for span in spans]),
            seq_lens=torch.tensor(reached),
            tails=_tails(spans, slots),
        )

    def __len__(self) -> int:
        """T"""
        return len(self.positions)

    def padded(self, rows: int, padding: int) -> "Batch":
        """The batch and, as one more request, rows of block `padding` up to `rows` in all."""
        missing = rows - len(self)
        if missing <= 0:
            return self
        more = Batch.of([Span([padding] * blocks_of(missing), 0, [0] * missing)])
        names = ("positions", "slot_mapping", "query_lens", "seq_lens")
        joined = {name: torch.cat([getattr(self, name), getattr(more, name)]) for name in names}
        ids = torch.cat([self.ids, more.ids.to(self.ids.device)])
        tables = _padded([*self.block_tables.tolist(), *more.block_tables.tolist()], 0)
        tails = None if self.tails is None else F.pad(self.tails, (0, 0, 0, missing), value=-1)
        return Batch(ids, block_tables=tables, tails=tails, **joined)


def blocks_of(tokens: int) -> int:
    """The number of blocks that hold some tokens."""
    return -(-tokens // BLOCK)


def slots_of(blocks: Sequence[int], start: int, count: int) -> list[int]:
    """The slots of a request's tokens at positions start … start + count − 1."""
    return [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, start + count)]


def _tails(spans: Sequence[Span], slots: list[int]) -> Tensor | None:
    """(T, L) slots of each row's tail."""
    if not any(span.tails for span in spans):
        return None
    rows = list[list[int]]()
    for span in spans:
        first = len(rows)
        for tail in span.tails or [()] * len(span.ids):
            rows.append([slots[first + row] for row in tail])
    return _padded(rows, -1)


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """(len(rows), longest) int64."""
    padded = torch.full((len(rows), max(map(len, rows))), filler)
    for to, row in zip(padded.numpy(), rows, strict=True):
        to[: len(row)] = row  # torch reads lists several times as slowly
    return padded
