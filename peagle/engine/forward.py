"""A model's forward over its cache. On a GPU those of few rows are recorded once, as CUDA graphs,
and then replayed: starting their kernels one by one takes longer than the kernels do.

A recording stands for all forwards of about as many rows and spans: what it reads lies at fixed
places in memory, padded, and is written anew before each replay.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from peagle.config import first_line
from peagle.engine.kv_cache import (
    CachedAttend,
    KVCache,
    Span,
    kernels,
    parts,
    place_list,
    positions,
)
from peagle.model.attend import ROW_TILE

ROWS = 256  # of a forward that is recorded, at most: kernels of more take their time anyway
TABLE = 4  # entries for each block of a cache: requests may share blocks

Output = TypeVar("Output", bound=tuple[Tensor | None, ...])

log = logging.getLogger(__name__)


def forward(
    model: Callable[..., Output],
    cache: KVCache,
    spans: list[Span],
    *rows: Tensor,
    tiled: bool = False,
) -> Output:
    """`model` (a target's or a drafter's forward, always the same over one cache) on packed `rows`,
    each (T, …), and their positions. What it returns may be overwritten by the next forward.
    `tiled`: see CachedAttend."""
    device = rows[0].device
    with torch.cuda.device_of(rows[0]):  # kernels start on the current one
        if kernels(device.type):
            if cache.graphs is None:
                cache.graphs = Graphs(cache, device, tiled)
            found: Output | None = cache.graphs.run(model, spans, rows)
            if found is not None:
                return found
        attend = CachedAttend(cache, spans, tiled=tiled)
        return model(*rows, positions(spans, device), attend)


class Graphs:
    """What was recorded over a cache."""

    def __init__(self, cache: KVCache, device: torch.device, tiled: bool) -> None:
        self.cache, self.tiled, self.usable = cache, tiled, True
        self.recorded: dict[tuple[int, int], Recorded] = {}
        self.blocks = torch.zeros(TABLE * cache.blocks, dtype=torch.int32, device=device)

    def run(
        self, model: Callable[..., Output], spans: list[Span], rows: Sequence[Tensor]
    ) -> Output | None:
        """The forward, by a recording; None where there can be none."""
        entries = sum(-(-span.end // self.cache.size) for span in spans)
        if not self.usable or len(rows[0]) > ROWS or entries > len(self.blocks):
            return None
        key = rounded(len(rows[0])), rounded(len(spans))
        if key not in self.recorded:
            try:
                self.recorded[key] = Recorded(model, self, key, spans, rows)
            except RuntimeError as error:  # a model that asks the GPU something on its way
                log.warning("slower without CUDA graphs: %s", first_line(error))
                self.usable = False
                return None
        return cast(Output, self.recorded[key](spans, rows))


class Recorded:
    """One recording: so many rows of so many spans, or fewer."""

    def __init__(
        self,
        model: Callable[..., Output],
        graphs: Graphs,
        key: tuple[int, int],
        spans: list[Span],
        rows: Sequence[Tensor],
    ) -> None:
        count, device = key[0], rows[0].device
        self.rows = [x.new_zeros(count, *x.shape[1:]) for x in rows]
        self.positions = torch.zeros(count, dtype=torch.int64, device=device)
        self.attend = FixedAttend(graphs, spans, *key, device)
        self._fill(spans, rows)
        self.replay, self.outputs = record(lambda: model(*self.rows, self.positions, self.attend))

    def __call__(self, spans: list[Span], rows: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        self._fill(spans, rows)
        self.replay()
        tokens = len(rows[0])
        return type(self.outputs)(*(None if x is None else x[:tokens] for x in self.outputs))

    def _fill(self, spans: list[Span], rows: Sequence[Tensor]) -> None:
        for fixed, new in zip(self.rows, rows, strict=True):
            fixed[: len(new)] = new
        self.positions[: len(rows[0])] = positions(spans, self.positions.device)
        self.attend.fill(spans)


class FixedAttend(CachedAttend):
    """One whose tables lie at fixed places in memory, with room for so many rows and spans."""

    def __init__(
        self, graphs: Graphs, spans: list[Span], rows: int, most: int, device: torch.device
    ) -> None:
        super().__init__(graphs.cache, spans, tiled=graphs.tiled)
        self._blocks, self._most = graphs.blocks, most
        self._slots: Tensor = torch.zeros(rows, dtype=torch.int64, device=device)
        self._heads: dict[tuple[int, int], Tensor] = {}  # items and spans of each table

    def fill(self, spans: list[Span]) -> None:
        """What is attended next. Rows of padding are kept where nobody reads."""
        self.spans, self._parts = spans, parts(spans)
        at = place_list(spans, self.cache.size)
        at += [self.cache.blocks * self.cache.size] * (len(self._slots) - len(at))
        self._slots.copy_(torch.tensor(at))
        for key in self._tables:
            self._write(*key)

    def _tokens(self) -> int:
        return ROW_TILE

    def _table(self, rows: int, groups: int, device: torch.device) -> Any:
        gpu = kernels(device.type)
        items = self._most + len(self._slots) // (rows // groups)
        head = torch.zeros(2 * items + 4 * (self._most + 1), dtype=torch.int32, device=device)
        self._heads[rows, groups] = head
        self._write(rows, groups)
        first, second = head[: 2 * items].view(-1, 2), head[2 * items :].view(-1, 4)
        longest = gpu.SPLITS * gpu.KEYS  # not known yet: enough for any number of splits
        return gpu.Table(first, second, self._blocks, longest, rows)

    def _write(self, rows: int, groups: int) -> None:
        """Items that are not needed take the last span, which has no tokens."""
        numbers, size = kernels(self._slots.device.type).numbers, self.cache.size
        items, table, blocks = numbers(self.packed(), size, rows // groups)
        head = self._heads[rows, groups]
        missing = len(head) // 2 - 2 * (self._most + 1) - len(items) // 2
        items += [self._most, 0] * missing
        head[: len(items) + len(table)] = torch.tensor(items + table, dtype=torch.int32)
        self._blocks[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)


def rounded(count: int) -> int:
    """No fewer: a power of two up to 16, then a multiple of 16. So there are not too many."""
    return 1 << (count - 1).bit_length() if count <= 16 else -(-count // 16) * 16


def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """What replays `run`, and where that leaves its results. All recordings share the memory of
    what lies between."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # kernels are compiled, layers of the cache made
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile.
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        outputs = run()
    return graph.replay, outputs


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()
