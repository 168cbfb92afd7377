"""Rows of a draft tree get from native attention, bit by bit, what they get without a tree.

A row is compared with plain decoding: its ancestors and itself in order, in a cache of their own.
"""

import random

import pytest
import torch
from test_cpu_attention import SIZES, SPECS, STEP, exact, past_and_new
from torch import Tensor

from peagle.backends.batch import Batch, Span, blocks_of
from peagle.backends.cpu.attention import CpuAttend
from peagle.backends.kv_cache import KVCache
from peagle.backends.tiles import tiles_of
from peagle.model.attention import AttentionSpec, HeadShape

ROOTS = [0, 14, 15, 30, 31, 33, 100]  # positions, about the groups of 16 and of 32 keys


def random_tails(nodes: int, seed: int) -> list[list[int]]:
    """A tree of `nodes` below a root: of each row its ancestors' rows, itself last. The first
    twenty are a chain, so that it reaches the next groups of keys."""
    draw, tails = random.Random(seed), [list[int]()]
    for node in range(1, nodes + 1):
        parent = node - 1 if node <= 20 else draw.randrange(node)
        tails.append([*tails[parent], node])
    return tails


class Keys:
    """A request's q of the rows of a tree, and k and v of the past in order, then of these rows."""

    def __init__(self, span: Span, shape: HeadShape, dtype: torch.dtype) -> None:
        self.span = span
        self.q, self.k, self.v = past_and_new(span, shape, dtype)

    @property
    def new(self) -> list[Tensor]:
        """q, k and v of the rows."""
        return [self.q, self.k[self.span.start :], self.v[self.span.start :]]

    def path(self, row: int) -> list[int]:
        """The past and a row's ancestors, itself last."""
        start = self.span.start
        return [*range(start + 1), *(start + at for at in self.span.tails[row])]

    def decoded(self, row: int, cache: KVCache, spec: AttentionSpec) -> Tensor:
        """(6, HV) of a row as plain decoding computes it, over blocks of another cache."""
        path = self.path(row)
        blocks = list(range(blocks_of(len(path))))
        past = Batch.of([Span(blocks, 0, [0] * len(path))])
        cache.write(0, past.slot_mapping, self.k[path], self.v[path])
        last = [part[row : row + 1] for part in self.new]
        return CpuAttend(Batch.of([Span(blocks, len(path) - 1, [0])]), cache)(0, *last, spec)[0]

    def exact(self, row: int, spec: AttentionSpec) -> Tensor:
        path = self.path(row)
        parts = [self.q[row : row + 1], self.k[path], self.v[path]]
        return exact(Span([], len(path) - 1, [0]), parts, spec)[0]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("shape", SIZES)
def test_rows_are_those_of_plain_decoding(shape: HeadShape, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec, free = SPECS[kind], torch.randperm(100).tolist()
    cache, other = (KVCache(100, [shape], dtype, torch.device("cpu")) for _ in range(2))
    for part in cache.layers[0]:
        part.fill_(1e4)  # what nobody may see
    requests = []
    for number, start in enumerate(ROOTS):
        tails = random_tails((3, 25, 40)[number % 3], number)
        blocks = [free.pop() for _ in range(blocks_of(start + len(tails)))]
        requests.append(Keys(Span(blocks, start, [0] * len(tails), tails), shape, dtype))
        if start:
            past = Batch.of([Span(blocks, 0, [0] * start)])
            cache.write(0, past.slot_mapping, requests[-1].k[:start], requests[-1].v[:start])
    # A prompt beside them.
    prompt = Keys(Span([free.pop(), free.pop()], 0, [0] * 20), shape, dtype)
    together = [*requests[:3], prompt, *requests[3:]]
    new = [torch.cat(parts) for parts in zip(*(r.new for r in together), strict=True)]
    batch = Batch.of([request.span for request in together])
    assert batch.tails is not None
    assert batch.tails.shape[1] > 20
    found = CpuAttend(batch, cache)(0, *new, spec)
    assert found.isfinite().all()
    rows = found.split([len(request.span.ids) for request in together])
    for request, outputs in zip(together, rows, strict=True):
        if not request.span.tails:
            wanted = exact(request.span, [request.q, request.k, request.v], spec)
            bound = 4 * STEP[dtype] * wanted.abs().amax()
            assert ((outputs.double() - wanted).abs() <= bound).all()
            continue
        for row, output in enumerate(outputs):
            assert torch.equal(output, request.decoded(row, other, spec))
            wanted = request.exact(row, spec)
            bound = 4 * STEP[dtype] * wanted.abs().amax()
            assert ((output.double() - wanted).abs() <= bound).all()


def test_a_row_of_a_tree_by_itself() -> None:
    """A part of a tree, as tiles of rows cut it, has the bits of the whole."""
    torch.manual_seed(0)
    shape, dtype = SIZES[2], torch.bfloat16
    cache = KVCache(8, [shape], dtype, torch.device("cpu"))
    tails = random_tails(30, 0)
    request = Keys(Span([3, 1, 5, 6], 20, [0] * len(tails), tails), shape, dtype)
    past = Batch.of([Span(request.span.blocks, 0, [0] * 20)])
    cache.write(0, past.slot_mapping, request.k[:20], request.v[:20])
    new = request.new
    batch = Batch.of([request.span])
    whole = CpuAttend(batch, cache)(0, *new, SPECS["plain"])
    for number, part in enumerate(tiles_of(batch, 4, cache.padding)):
        rows = [torch.cat([x, x.new_zeros(4, *x.shape[1:])])[4 * number :][:4] for x in new]
        count = min(4, len(whole) - 4 * number)
        found = CpuAttend(part, cache)(0, *rows, SPECS["plain"])[:count]
        assert torch.equal(found, whole[4 * number :][:count])
