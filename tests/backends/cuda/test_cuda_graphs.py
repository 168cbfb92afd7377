"""Recorded forwards: what lies at fixed places is all that a replay reads."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peagle.backends.batch import BLOCK, Batch, Span
from peagle.backends.kv_cache import KVCache
from peagle.backends.torch import TorchAttend
from peagle.model.attention import Attend, AttentionSpec, HeadShape

graphs = pytest.importorskip("peagle.backends.cuda.graphs", reason="no Triton")

from recorders import DEVICE, CountingRecorder  # noqa: E402 (needs Triton)

SHAPES = [HeadShape(2, 8, 8), HeadShape(1, 16, 8)]  # layers may differ
HEADS, WIDTH = 4, 32


class StandIn(nn.Module):
    """A model of two layers; as a drafter it takes features, as a target it has taps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList()
        for shape in SHAPES:
            wide = HEADS * shape.key_size + shape.heads * (shape.key_size + shape.value_size)
            self.layers.append(nn.Linear(WIDTH, wide))

    def forward(self, ids: Tensor, *inputs: Any, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        *features, positions, attend = inputs
        x = self.embedding(ids) + torch.sin(positions)[:, None] + sum(features)
        entered = []
        for index, (shape, layer) in enumerate(zip(SHAPES, self.layers, strict=True)):
            entered.append(x)
            heads, key_size, value_size = shape
            sizes = [HEADS * key_size, heads * key_size, heads * value_size]
            q, k, v = layer(x).split(sizes, -1)
            q, k, v = (
                y.unflatten(-1, (-1, size))
                for y, size in zip((q, k, v), (key_size, key_size, value_size), strict=True)
            )
            x = x + attend(index, q, k, v, AttentionSpec(key_size**-0.5)).flatten(1)
        return x, torch.cat([x[:, :0], *(entered[tap] for tap in taps)], -1)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    CountingRecorder.count = 0
    monkeypatch.setattr(graphs, "Recorder", CountingRecorder)


def spans(*requests: tuple[list[int], int, int]) -> list[Span]:
    """Spans from blocks, start and number of rows."""
    made = []
    for blocks, start, rows in requests:
        made.append(Span(blocks, start, torch.randint(50, (rows,)).tolist()))
    return made


def small_rounds() -> list[list[Span]]:
    """Fewer rows and requests than a recording has room for, and as many; blocks lie anywhere."""
    torch.manual_seed(1)
    return [
        spans(([3, 5], 0, 9), ([1], 0, 7)),
        spans(([3, 5], 9, 2), ([1], 7, 3), ([0, 6], 0, 3)),
        spans(([3, 5], 11, 4), ([1], 10, 1), ([0, 6], 3, 14)),
        spans(([3, 5], 15, 3), ([0, 6], 17, 1), ([1], 11, 4)),
    ]


def new_cache(blocks: int = 7) -> KVCache:
    return KVCache(blocks, SHAPES, torch.float32, DEVICE)


def by_torch(model: Callable[..., Any], batch: Batch, cache: KVCache, *rows: Tensor) -> Any:
    attend = TorchAttend(batch, cache, exact=False)
    with torch.no_grad():
        return model(batch.ids.to(DEVICE), *rows, batch.positions.to(DEVICE), attend)


def assert_as_torch(
    rounds: list[list[Span]],
    *,
    exact: bool = False,
    taps: tuple[int, ...] = (),
    drafter: bool = False,
) -> None:
    """Every round's outputs are those of the reference, over caches of their own."""
    model = partial(StandIn().to(DEVICE), taps=taps)
    blocks = 1 + max(block for round_ in rounds for span in round_ for block in span.blocks)
    caches, runner = (new_cache(blocks), new_cache(blocks)), graphs.Runner(exact=exact)
    for round_ in rounds:
        batch, rows = Batch.of(round_), []
        if drafter:
            rows = [torch.randn(len(batch), WIDTH, device=DEVICE)]
        found = runner.run(model, batch, caches[0], rows=rows, taps=taps)
        for one, two in zip(found, by_torch(model, batch, caches[1], *rows), strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_replays_equal_the_reference(exact: bool) -> None:
    rounds = small_rounds()
    assert_as_torch([rounds[0], *rounds], exact=exact, taps=(0, 1))
    assert CountingRecorder.count == 3  # 16 rows of 2 requests; 8 of 4, twice; 32 of 4


def test_a_drafter_is_recorded_with_its_features() -> None:
    rounds = small_rounds()
    assert_as_torch([*rounds, *rounds], drafter=True)
    assert CountingRecorder.count == 3


@pytest.mark.slow
def test_batches_of_changing_shapes() -> None:
    """Prompts of up to 1,024 rows beside drafts; then the same recording with other blocks."""
    torch.manual_seed(2)
    first, second, third = list(range(62)), list(range(62, 65)), list(range(65, 130))
    rounds = [
        spans((second, 0, 20)),
        spans((first, 0, 960), (second, 20, 4)),
        spans((third, 0, 1000), (first, 960, 1)),
        spans((first, 961, 5), (third, 1000, 5), (second, 24, 6)),
    ]
    assert_as_torch(rounds)
    assert CountingRecorder.count == 2  # 1,024 rows of 2 requests, twice; 16 of 4


def test_taps_have_recordings_of_their_own() -> None:
    model, cache, runner = StandIn().to(DEVICE), new_cache(), graphs.Runner(exact=False)
    batch = Batch.of(small_rounds()[0])
    for _ in range(2):
        for taps in ((), (0, 1)):
            found = runner.run(partial(model, taps=taps), batch, cache, taps=taps)
            wanted = by_torch(partial(model, taps=taps), batch, new_cache())
            torch.testing.assert_close(found[1], wanted[1])
    assert CountingRecorder.count == 2


def test_what_cannot_be_recorded_is_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand much more")

    monkeypatch.setattr(CountingRecorder, "record", refused)
    assert_as_torch(small_rounds())
    assert caplog.messages == [
        "slower without CUDA graphs: operation not permitted when stream is capturing"
    ]


def without_attention(ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor]:
    return ((ids[:, None] + positions[:, None]).float(),)


def test_large_batches_are_not_recorded() -> None:
    runner, cache = graphs.Runner(exact=True), new_cache(65)
    longer = Batch.of(spans((list(range(65)), 0, graphs.MAX_GRAPH_ROWS + 1)))
    for _ in range(2):
        (found,) = runner.run(without_attention, longer, cache)
        assert torch.equal(found[:, 0].long().cpu(), longer.ids + longer.positions)
    assert not CountingRecorder.count


def test_block_tables_without_room_are_not_recorded() -> None:
    """Requests that share a long prefix, of more blocks together than there are places."""
    runner, cache = graphs.Runner(exact=False), new_cache(4000)
    shared = list(range(3990))
    many = [([*shared, 3990 + i], 3990 * BLOCK, 1) for i in range(10)]
    for some in (many[:2], many):
        batch = Batch.of(spans(*some))
        for _ in range(2):
            (found,) = runner.run(without_attention, batch, cache)
            assert torch.equal(found[:, 0].long().cpu(), batch.ids + batch.positions)
        assert CountingRecorder.count == 1


@pytest.mark.skipif(DEVICE.type != "cuda", reason="recordings are CUDA graphs on a GPU alone")
def test_garbage_with_recordings_does_not_spoil_a_recording() -> None:
    """An engine that is gone may be in a cycle of references, which is freed at any time."""
    recorder, x = graphs.Recorder(), torch.zeros(4, device=DEVICE)
    cycle: list[Any] = [recorder.record(lambda: x.add_(1))]
    cycle.append(cycle)
    del cycle
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # every object that is made may free the cycle
    try:
        replay = graphs.Recorder().record(lambda: [x.mul_(2) for _ in range(100)] and None)
    finally:
        gc.set_threshold(*threshold)
    x.fill_(1)
    replay()
    assert x.tolist() == [2.0**100] * 4


def test_recordings_are_freed_with_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU, what is played holds the cache; a CUDA graph holds no tensors.
    if DEVICE.type != "cuda":
        monkeypatch.setattr(CountingRecorder, "record", lambda _, run: lambda: None)
    cache, runner = new_cache(), graphs.Runner(exact=False)
    for round_ in small_rounds():
        runner.run(StandIn().to(DEVICE), Batch.of(round_), cache)
    assert len(runner.graphs) == 1
    del cache
    gc.collect()
    assert len(runner.graphs) == 0


def tree(blocks: list[int], start: int, tails: list[list[int]]) -> Span:
    return Span(blocks, start, torch.randint(50, (len(tails),)).tolist(), tails)


@pytest.mark.parametrize("exact", [False, True])
def test_replays_with_draft_trees(exact: bool) -> None:
    """Trees of other shapes, alone and beside chains, then no tree."""
    torch.manual_seed(3)
    deep = [[], [1], [1, 2], [1, 2, 3], [1, 4], [5]]
    flat = [[], [1], [2], [3]]
    rounds = [
        spans(([3, 5], 0, 15), ([1], 0, 7)),
        [tree([3, 5], 15, deep), *spans(([1], 7, 2))],
        [*spans(([3, 5], 17, 4)), tree([1], 8, flat)],
        [tree([3, 5], 18, flat), tree([1], 9, flat)],
        spans(([3, 5], 20, 3), ([1], 10, 5)),
    ]
    assert_as_torch(rounds, exact=exact)
    assert CountingRecorder.count == 2  # 8 rows of 2 requests: with trees, three times; without


def test_tails_without_room_are_not_recorded() -> None:
    """A chain of 300 draft tokens, written as a tree."""
    runner, cache = graphs.Runner(exact=False), new_cache(20)
    batch = Batch.of([tree(list(range(20)), 0, [list(range(1, row + 1)) for row in range(300)])])
    for _ in range(3):
        (found,) = runner.run(without_attention, batch, cache)
        assert torch.equal(found[:, 0].long().cpu(), batch.ids + batch.positions)
    assert not CountingRecorder.count


def test_buckets() -> None:
    counts = (1, 2, 3, 8, 9, 16, 17, 33, 128, 129, 256, 300, 513, 1000, 1024)
    found = [graphs.row_bucket(count) for count in counts]
    assert found == [1, 2, 4, 8, 16, 16, 32, 48, 128, 160, 256, 320, 640, 1024, 1024]
    assert [graphs.request_bucket(count) for count in (1, 2, 3, 5, 8, 33)] == [1, 2, 4, 8, 8, 64]
