"""A model's forwards on a GPU. Small ones are recorded as CUDA graphs and then replayed: starting
their kernels one by one takes longer than the kernels do.

A recording serves all batches of about as many rows and requests; batches with draft trees have
recordings of their own. It reads fixed buffers, which are written anew before each replay, and
leaves its outputs in fixed buffers. All recordings over one cache share these, and the memory for
what is computed between.

Shapes: T rows.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from peagle.backends.batch import BLOCK, Batch
from peagle.backends.cuda.attention import CudaAttend
from peagle.backends.cuda.device_batch import DeviceBatch, pack
from peagle.backends.kv_cache import KVCache

MAX_GRAPH_ROWS = 1024  # larger batches are not launch-bound
TABLE_ENTRIES_PER_BLOCK = 4  # room for block tables: requests may share blocks
TAIL_SLOTS_PER_ROW = 16  # room for the tails of draft trees

Tensors = tuple[Tensor, ...]  # each (T, …)
Model = Callable[..., Tensors]  # (ids, *rows, positions, attend)
Taps = tuple[int, ...]
Replay = Callable[[], None]

log = logging.getLogger(__name__)


class Runner:
    """Runs one model's batches, by recordings where it can."""

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self.graphs = WeakKeyDictionary[KVCache, dict[Taps, Graphs]]()

    @torch.no_grad()
    def run(
        self,
        model: Model,  # always the same for the same taps
        batch: Batch,
        cache: KVCache,
        *,
        rows: Sequence[Tensor] = (),  # further inputs of the model, each (T, …)
        taps: Taps = (),
    ) -> Tensors:
        """The model's outputs. They may be overwritten by the next run over that cache."""
        forward = Forward(model, cache, self.exact)
        graphs = self.graphs.setdefault(cache, {})
        with torch.cuda.device_of(cache.layers[0][0]):  # kernels start on the current device
            if taps in graphs:
                return graphs[taps].run(forward, batch, rows)
            outputs = forward.directly(batch, rows)
            graphs[taps] = Graphs(cache, rows, outputs)
        return outputs


class Forward(NamedTuple):
    """A model's forward over a cache."""

    model: Model
    cache: KVCache
    exact: bool

    def directly(self, batch: Batch, rows: Sequence[Tensor]) -> Tensors:
        """Run a batch without a recording."""
        on_device = DeviceBatch.of(batch, self.cache.padding, self.cache.device)
        return self.over(on_device, rows, int(batch.positions.max()) + 1)

    def over(self, batch: DeviceBatch, rows: Sequence[Tensor], longest: int) -> Tensors:
        """Run a batch that is on the device, whose requests see at most `longest` keys."""
        attend = CudaAttend(batch, self.cache, longest, exact=self.exact)
        return self.model(batch.ids, *rows, batch.positions, attend)


class Graphs:
    """The recordings of one model over one cache. They must not hold the cache: they are freed
    when it is."""

    def __init__(self, cache: KVCache, rows: Sequence[Tensor], outputs: Tensors) -> None:
        """`rows` and `outputs` of one forward show the shapes of the fixed buffers."""
        count = (6 + TAIL_SLOTS_PER_ROW) * MAX_GRAPH_ROWS + 2
        count += TABLE_ENTRIES_PER_BLOCK * cache.padding
        self.numbers = torch.zeros(count, dtype=torch.int64, device=cache.device)
        self.rows = [_fixed_buffer(x) for x in rows]
        self.outputs = [_fixed_buffer(x) for x in outputs]
        self.recorder = Recorder()
        self.usable = True
        self.replays = dict[tuple[int, int, bool], Replay]()

    def run(self, forward: Forward, batch: Batch, rows: Sequence[Tensor]) -> Tensors:
        """The forward's outputs, by a recording if the batch fits."""
        if not self.usable or len(batch) > MAX_GRAPH_ROWS:
            return forward.directly(batch, rows)
        size = row_bucket(len(batch)), request_bucket(len(batch.query_lens))
        packed = pack(batch, *size, forward.cache.padding)
        if len(packed) > len(self.numbers):
            return forward.directly(batch, rows)
        trees = batch.tails is not None
        fixed = DeviceBatch(self.numbers, *size, trees=trees)
        fixed.fill(packed, batch)
        for buffer, new in zip(self.rows, rows, strict=True):
            buffer[: len(new)] = new
        key = *size, trees
        if key not in self.replays:
            try:
                self.replays[key] = self._record(forward, fixed)
            except RuntimeError as error:  # a model that asks the GPU something on its way
                log.warning("slower without CUDA graphs: %s", str(error).partition("\n")[0])
                self.usable = False
                return forward.directly(batch, rows)
        self.replays[key]()
        return tuple(buffer[: len(batch)] for buffer in self.outputs)

    def _record(self, forward: Forward, batch: DeviceBatch) -> Replay:
        """A recording over the buffers that the batch's numbers are in now."""
        rows = [buffer[: batch.rows] for buffer in self.rows]
        longest = forward.cache.padding * BLOCK

        def run() -> None:
            outputs = forward.over(batch, rows, longest)
            for buffer, new in zip(self.outputs, outputs, strict=True):
                buffer[: batch.rows] = new

        return self.recorder.record(run)


class Recorder:
    """Records functions as CUDA graphs that share one memory pool. All are freed together."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Replay:
        """A replay of `run`, which is run once. Raises RuntimeError if it cannot be captured."""
        run()  # kernels are compiled
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # freeing another engine's graph now would invalidate this one
        try:
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                run()
        finally:
            gc.enable()
        return graph.replay


def row_bucket(count: int) -> int:
    """Round up to a power of two if that is at most 16, else to an eighth of one, at least 16."""
    power = 1 << (count - 1).bit_length()
    if power <= 16:
        return power
    step = max(16, power // 8)
    return -(-count // step) * step


def request_bucket(count: int) -> int:
    """Round up to a power of two. A request without rows costs next to nothing."""
    return 1 << (count - 1).bit_length()


def _fixed_buffer(like: Tensor) -> Tensor:
    return like.new_zeros(MAX_GRAPH_ROWS, *like.shape[1:])
