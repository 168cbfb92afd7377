"""Our forward of every family equals transformers' own: whole, cached, in blocks and packed."""

import pytest
import torch
from families import FAMILIES, TAPS, WINDOW, Reference, build, random_ids, reference
from torch import Tensor

from peagle.engine.engine import tiles
from peagle.engine.kv_cache import CachedAttend, KVCache, Span, positions
from peagle.model.attend import ROW_TILE, CausalAttend
from peagle.model.target import Target, TargetOutput

LENGTH = 14
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[*FAMILIES, "llama lean", "qwen3 lean"])
def family(request: pytest.FixtureRequest) -> tuple[Target, Reference, Reference]:
    """A target, and what transformers computes with the same weights for two sequences."""
    name, _, lean = request.param.partition(" ")
    model = build(FAMILIES[name]())
    first, second = (reference(model, random_ids(n, seed=n)) for n in (LENGTH, LENGTH - 5))
    target = Target(model, None, request.param)  # from here on the model attends through us
    target.tap(TAPS)
    if lean:
        target.lean()
    return target, first, second


def check(target: Target, out: TargetOutput, wanted: Reference, rows: slice) -> None:
    assert out.features is not None
    close(target.logits(out.hidden), wanted.logits[rows])
    close(out.features, wanted.features[rows])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def run(target: Target, cache: KVCache, ids: Tensor, spans: list[Span]) -> TargetOutput:
    return target.forward(ids, positions(spans, CPU), CachedAttend(cache, spans))


def test_whole_sequence(family: tuple[Target, Reference, Reference]) -> None:
    target, wanted, _ = family
    out = target.forward(wanted.ids, torch.arange(LENGTH), CausalAttend())
    check(target, out, wanted, slice(None))


def test_the_last_norm_makes_the_hidden_states(
    family: tuple[Target, Reference, Reference],
) -> None:
    target, wanted, _ = family
    left: list[Tensor] = []
    hook = target.layers[-1].register_forward_hook(lambda _, __, out: left.append(out[0]))
    hidden = target.forward(wanted.ids, torch.arange(LENGTH), CausalAttend()).hidden
    hook.remove()
    close(target.last_norm()(left[0]), hidden)
    with pytest.raises(AssertionError):
        close(left[0], hidden)


def test_logits_of_some_rows(family: tuple[Target, Reference, Reference]) -> None:
    target, wanted, _ = family
    hidden = target.forward(wanted.ids, torch.arange(LENGTH), CausalAttend()).hidden
    close(target.logits(hidden[[3, -1]]), wanted.logits[[3, -1]])


@pytest.mark.parametrize("block", [1, 3])
def test_prefill_then_decode(family: tuple[Target, Reference, Reference], block: int) -> None:
    target, wanted, _ = family
    cache = KVCache(1, LENGTH + block)
    starts = [0, *range(WINDOW + 2, LENGTH, block)]  # the context outgrows the window on the way
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        out = run(target, cache, wanted.ids[start:end], [Span([0], start, end - start)])
        check(target, out, wanted, slice(start, end))


def test_rejected_tokens_are_overwritten(family: tuple[Target, Reference, Reference]) -> None:
    target, wanted, _ = family
    cache = KVCache(1, LENGTH)
    run(target, cache, wanted.ids[:6], [Span([0], 0, 6)])
    drafted = torch.cat([wanted.ids[6:8], wanted.ids[8:11].flip(0)])  # two right, three wrong
    run(target, cache, drafted, [Span([0], 6, 5)])
    check(target, run(target, cache, wanted.ids[8:9], [Span([0], 8, 1)]), wanted, slice(8, 9))
    check(target, run(target, cache, wanted.ids[9:], [Span([0], 9, 5)]), wanted, slice(9, None))


def test_packed_requests_do_not_see_each_other(
    family: tuple[Target, Reference, Reference],
) -> None:
    target, first, second = family
    cache = KVCache(3, LENGTH)
    packed = [  # each step: (request's row, reference, start, end); they prefill and decode at once
        [(2, first, 0, 9), (0, second, 0, 2)],
        [(0, second, 2, 8), (2, first, 9, 10)],
        [(2, first, 10, 14), (0, second, 8, 9)],
    ]
    for step in packed:
        spans = [Span([row], start, end - start) for row, _, start, end in step]
        ids = torch.cat([ref.ids[start:end] for _, ref, start, end in step])
        out = run(target, cache, ids, spans)
        lengths = [span.length for span in spans]
        assert out.features is not None
        parts = zip(out.hidden.split(lengths), out.features.split(lengths), strict=True)
        for (hidden, features), (_, ref, start, end) in zip(parts, step, strict=True):
            check(target, TargetOutput(hidden, features), ref, slice(start, end))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_depend_on_nothing_beside_them(family: str, dtype: torch.dtype) -> None:
    """Windows, sinks, caps, and experts that see another number of rows each time."""
    target = Target(build(FAMILIES[family]()).to(dtype), None, family)
    target.exact(True)
    ids = random_ids(40, seed=3)

    def logits(lengths: list[int]) -> Tensor:
        cache, start, rows = KVCache(5, 8), 0, []
        for length in lengths:
            for tile in tiles([Span(range(5), start, length)], ROW_TILE):
                attend = CachedAttend(cache, tile, tiled=True)
                part = ids[tile[0].start : tile[-1].end]
                rows.append(
                    target.logits(target.forward(part, positions(tile, CPU), attend).hidden)
                )
            start += length
        return torch.cat(rows)

    singly = logits([1] * 40)
    for lengths in ([40], [3, 9, 8, 1, 7, 12]):
        assert torch.equal(singly, logits(lengths)), lengths
