"""Native attention is the reference's, in batches of every shape, and each row's own."""

import pytest
import torch
from torch import Tensor

from peagle.backends.batch import Batch, Span
from peagle.backends.cpu.attention import CpuAttend
from peagle.backends.kv_cache import KVCache
from peagle.model.attention import AttentionSpec, HeadShape, attention, causal_mask

STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}
SPECS = {
    "plain": AttentionSpec(0.3),
    "a window": AttentionSpec(0.3, window=21),
    "a soft cap": AttentionSpec(0.3, softcap=2.0),
    "sinks in a window": AttentionSpec(0.3, window=1, sinks=torch.linspace(-1, 2, 6)),
}
SIZES = [HeadShape(2, 16, 16), HeadShape(6, 10, 7), HeadShape(1, 64, 64)]
LENGTHS = [(0, 1), (15, 1), (16, 5), (40, 9), (100, 32), (3, 40), (0, 100)]  # start, rows


def past_and_new(span: Span, shape: HeadShape, dtype: torch.dtype) -> list[Tensor]:
    """q of the span's rows, k and v of all its tokens."""
    tokens = span.start + len(span.ids)
    q = torch.randn(len(span.ids), 6, shape.key_size).to(dtype)
    k = torch.randn(tokens, shape.heads, shape.key_size).to(dtype)
    v = torch.randn(tokens, shape.heads, shape.value_size).to(dtype)
    return [q, k, v]


def exact(span: Span, parts: list[Tensor], spec: AttentionSpec) -> Tensor:
    q, k, v = (part.double() for part in parts)
    mask = causal_mask(span.start, len(q), spec.window, q.device)
    sinks = None if spec.sinks is None else spec.sinks.double()
    return attention(q, k, v, mask, spec._replace(sinks=sinks))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("shape", SIZES)
def test_attention(shape: HeadShape, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec, free = SPECS[kind], torch.randperm(64).tolist()
    cache = KVCache(64, [shape], dtype, torch.device("cpu"))
    for part in cache.layers[0]:
        part.fill_(1e4)  # what nobody may see
    spans, tensors = [], []
    for start, rows in LENGTHS:
        blocks = [free.pop() for _ in range(-(-(start + rows) // 16))]
        span = Span(blocks, start, [0] * rows)
        parts = past_and_new(span, shape, dtype)
        spans.append(span)
        tensors.append(parts)
        if start:
            past = Batch.of([Span(blocks, 0, [0] * start)])
            cache.write(0, past.slot_mapping, parts[1][:start], parts[2][:start])
    q = torch.cat([parts[0] for parts in tensors])
    new = [
        torch.cat([p[i][-len(s.ids) :] for p, s in zip(tensors, spans, strict=True)])
        for i in (1, 2)
    ]
    batch = Batch.of(spans).padded(len(q) + 5, cache.padding)
    filled = [torch.cat([x, x.new_zeros(5, *x.shape[1:])]) for x in (q, *new)]
    together = CpuAttend(batch, cache)(0, *filled, spec)
    assert together.isfinite().all()
    rows = together[: len(q)].split([len(span.ids) for span in spans])
    for span, parts, found in zip(spans, tensors, rows, strict=True):
        wanted = exact(span, parts, spec)
        bound = 4 * STEP[dtype] * wanted.abs().amax()
        assert ((found.double() - wanted).abs() <= bound).all()
        last = Batch.of([Span(span.blocks, span.start + len(span.ids) - 1, [0])])
        alone = CpuAttend(last, cache)(0, *(part[-1:] for part in parts), spec)
        assert torch.equal(alone[0], found[-1]), "a row by itself"


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("shape", SIZES)
def test_what_is_not_a_number_is_not_hidden(shape: HeadShape, dtype: torch.dtype) -> None:
    """Rows that see it are no numbers, so that the engine can say so; all others are."""
    torch.manual_seed(0)
    span = Span([0, 1, 2], 0, [0] * 40)
    for part, row in ((0, 17), (1, 33)):
        parts = past_and_new(span, shape, dtype)
        parts[part][row, 0, 3] = float("nan")
        cache = KVCache(3, [shape], dtype, torch.device("cpu"))
        out = CpuAttend(Batch.of([span]), cache)(0, *parts, SPECS["plain"])
        seen = range(row, row + 1) if part == 0 else range(row, 40)
        heads = 1 if part == 0 else 6 // shape.heads
        assert out[seen.start : seen.stop, :heads].isnan().all()
        assert out[: seen.start].isfinite().all() and out[seen.stop :].isfinite().all()
        assert out[:, heads:].isfinite().all()
