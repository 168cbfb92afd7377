"""Rows, their slots and what they see, against lists made row by row; parts see what the whole
sees."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from packed import Rows, random_rows

from peagle.backends.batch import BLOCK, Batch, Span, slots_of
from peagle.backends.tiles import tiles_of
from peagle.backends.torch import views

POOL = 24
PADDING = POOL  # the block of padding
BATCHES = 60


class Row(NamedTuple):
    """One row of a batch."""

    token: int
    position: int
    slot: int
    seen: list[int]  # slots in the order of their positions, the row's own last


def expected(requests: list[Rows]) -> list[Row]:
    rows = list[Row]()
    for one in requests:
        blocks, start = one.span.blocks, one.span.start

        def slot(kind: str, index: int, blocks=blocks, start=start) -> int:  # noqa: ANN001
            at = index + (start if kind == "row" else 0)
            return int(blocks[at // BLOCK] * BLOCK + at % BLOCK)

        for index, (token, seen) in enumerate(zip(one.span.ids, one.visible, strict=True)):
            slots = [slot(kind, i) for kind, i in seen]
            rows.append(Row(token, len(seen) - 1, slot("row", index), slots))
    return rows


def rows_of(batch: Batch) -> list[Row]:
    """Read the fields of a batch row by row."""
    owner = [i for i, count in enumerate(batch.query_lens.tolist()) for _ in range(count)]
    assert len(owner) == len(batch) == len(batch.ids) == len(batch.slot_mapping)
    rows = list[Row]()
    for index, request in enumerate(owner):
        position, tail = int(batch.positions[index]), list[int]()
        if batch.tails is not None:
            tail = [slot for slot in batch.tails[index].tolist() if slot >= 0]
            filler = batch.tails[index, len(tail) :]
            assert (filler == -1).all(), "the tail comes first"
        table = batch.block_tables[request].tolist()
        seen = [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(position + 1 - len(tail))]
        assert len(seen) <= batch.seq_lens[request], "seq_lens bounds what is read of a table"
        slot = int(batch.slot_mapping[index])
        rows.append(Row(int(batch.ids[index]), position, slot, seen + tail))
    return rows


def seen_by_the_reference(batch: Batch) -> Iterator[list[int]]:
    """Slots that each row sees by the views of the reference backend."""
    for rows, slots in views(batch):
        count = rows.stop - rows.start
        for index in range(count):
            yield slots[: len(slots) - count + index + 1].tolist()


def drawn() -> Iterator[tuple[list[Rows], Batch]]:
    """Random requests, and the batch of them."""
    for seed in range(BATCHES):
        requests = random_rows(random.Random(seed), POOL)
        yield requests, Batch.of([one.span for one in requests])


def test_every_row_is_where_it_should_be() -> None:
    for requests, batch in drawn():
        assert rows_of(batch) == expected(requests)
        assert list(seen_by_the_reference(batch)) == [row.seen for row in expected(requests)]


def test_the_requests_fields() -> None:
    for requests, batch in drawn():
        assert batch.query_lens.tolist() == [len(one.visible) for one in requests]
        for one, table, reached in zip(requests, batch.block_tables, batch.seq_lens, strict=True):
            span = one.span
            needed = -(-(span.start + len(span.ids)) // BLOCK)
            assert table[:needed].tolist() == list(span.blocks[:needed]), "those that are filled"
            assert not table[needed:].any()
            assert reached == span.start + (1 if span.tails else len(span.ids))
        assert (batch.tails is not None) == any(one.span.tails for one in requests)


@pytest.mark.parametrize("size", [1, 3, 8, 200])
def test_tiles_keep_what_every_row_sees(size: int) -> None:
    for _, whole in drawn():
        tiles = list(tiles_of(whole, size, PADDING))
        assert [len(tile) for tile in tiles] == [size] * -(-len(whole) // size)
        rows = [row for tile in tiles for row in rows_of(tile)]
        assert rows[: len(whole)] == rows_of(whole)
        check_padding(rows[len(whole) :])
        seen = [slots for tile in tiles for slots in seen_by_the_reference(tile)]
        assert seen[: len(whole)] == [row.seen for row in rows_of(whole)]


@pytest.mark.parametrize("missing", [-3, 0, 1, 7, 50])
def test_padding_changes_no_row(missing: int) -> None:
    for _, whole in drawn():
        padded = whole.padded(len(whole) + missing, PADDING)
        assert len(padded) == len(whole) + max(0, missing)
        rows = rows_of(padded)
        assert rows[: len(whole)] == rows_of(whole)
        check_padding(rows[len(whole) :])
        assert len(padded.query_lens) == len(whole.query_lens) + (missing > 0), "one more request"


def check_padding(rows: list[Row]) -> None:
    """Only its own block: no request's keys are read or written over."""
    for row in rows:
        assert row.slot // BLOCK == PADDING and row.token == 0
        assert {slot // BLOCK for slot in row.seen} == {PADDING}


def test_by_hand() -> None:
    """The table of batch.py, m = 17, after a chunk of a prompt."""
    prompt = Span([4], 2, [7, 8, 9])
    draft = Span([1, 5], 17, [50, 51, 52, 53], [[], [1], [2], [2, 3]])
    batch = Batch.of([prompt, draft])
    assert batch.ids.tolist() == [7, 8, 9, 50, 51, 52, 53]
    assert batch.positions.tolist() == [2, 3, 4, 17, 18, 18, 19]
    assert batch.slot_mapping.tolist() == [66, 67, 68, 81, 82, 83, 84]
    assert batch.block_tables.tolist() == [[4, 0], [1, 5]]
    assert batch.query_lens.tolist() == [3, 4]
    assert batch.seq_lens.tolist() == [5, 18]
    assert batch.tails is not None
    none = [-1, -1]
    tails = [none, none, none, none, [82, -1], [83, -1], [83, 84]]
    assert batch.tails.tolist() == tails


def test_ids_may_be_given_apart() -> None:
    """Tokens that are on a device stay there."""
    ids = torch.tensor([70, 71])
    batch = Batch.of([Span([0], 3, [0]), Span([1], 4, [0])], ids)
    assert batch.ids is ids and batch.positions.tolist() == [3, 4]


@pytest.mark.parametrize("tails", [(), [[]], [[], [1]]])
def test_all_is_in_whole_numbers(tails: list[list[int]]) -> None:
    """Also the tails of a tree that is its root alone."""
    whole = Batch.of([Span([0], 3, [5] * max(1, len(tails)), tails)])
    for batch in (whole, whole.padded(4, PADDING), *tiles_of(whole, 3, PADDING)):
        fields = [batch.ids, batch.positions, batch.slot_mapping, batch.block_tables]
        fields += [batch.query_lens, batch.seq_lens]
        if batch.tails is not None:
            fields.append(batch.tails)
        assert {field.dtype for field in fields} == {torch.int64}


def test_slots_of() -> None:
    assert slots_of([3, 0, 7], 14, 4) == [62, 63, 0, 1]
    assert slots_of([3], 0, 0) == []


def test_a_request_needs_blocks_for_all_its_rows() -> None:
    with pytest.raises(IndexError):
        Batch.of([Span([0], 14, [5, 6, 7])])


@pytest.mark.parametrize("tails", [[[]], [[], [1]], [[], [1], [2], [3]]])
def test_every_row_of_a_tree_has_a_tail(tails: list[list[int]]) -> None:
    """Native code would read past the end of what is too short."""
    with pytest.raises(ValueError, match=f"{len(tails)} tails for 3 rows"):
        Batch.of([Span([1], 0, [0]), Span([0], 3, [5, 6, 7], tails)])
