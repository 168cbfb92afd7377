"""The GPU's attention against torch's, by Triton's interpreter where there is no GPU, and compiled
for GPUs that are not here."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.backends.batch import BLOCK, Batch, Span
from peagle.backends.kv_cache import KVCache
from peagle.backends.torch import TorchAttend
from peagle.model.attention import AttentionSpec, CausalAttend, HeadShape

attention = pytest.importorskip("peagle.backends.cuda.attention", reason="no Triton")
device_batch = pytest.importorskip("peagle.backends.cuda.device_batch", reason="no Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS = 30
# Start and rows: one token after a long context, a draft, a prompt of several tiles, one key.
REQUESTS = [(70, 1), (20, 5), (2, 23), (0, 1)]
SHAPES = {  # query heads, key heads, sizes of keys and of values
    "as SmolLM2": (6, 2, 64, 64),
    "one head of keys, sizes that are no power of two": (8, 1, 24, 12),
    "no groups": (2, 2, 8, 8),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "cap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 20, "sinks": True},
}


def spec_of(kind: str, heads: int, size: int) -> AttentionSpec:
    more = dict(KINDS[kind])
    if "sinks" in more:
        more["sinks"] = torch.randn(heads, device=DEVICE)
    return AttentionSpec(size**-0.5, **more)


def spans_of(requests: list[tuple[int, int]]) -> list[Span]:
    """Requests whose blocks lie anywhere."""
    free = torch.randperm(BLOCKS).tolist()
    spans = []
    for start, rows in requests:
        blocks = [free.pop() for _ in range(-(-(start + rows) // BLOCK))]
        spans.append(Span(blocks, start, [0] * rows))
    return spans


def case(shape: str, dtype: torch.dtype) -> tuple[KVCache, list[Span], list[Tensor]]:
    """A full cache, requests, and their queries, keys and values."""
    heads, kv_heads, key_size, value_size = SHAPES[shape]
    cache = KVCache(BLOCKS, [HeadShape(kv_heads, key_size, value_size)], dtype, DEVICE)
    for kept in cache.layers[0]:
        kept.normal_()
    spans = spans_of(REQUESTS)
    rows = sum(len(span.ids) for span in spans)
    sizes = ((heads, key_size), (kv_heads, key_size), (kv_heads, value_size))
    return cache, spans, [torch.randn(rows, *size, device=DEVICE).to(dtype) for size in sizes]


def cuda_attend(spans: list[Span], cache: KVCache, *, exact: bool = False) -> Any:
    batch = Batch.of(spans)
    on_device = device_batch.DeviceBatch.of(batch, cache.padding, DEVICE)
    return attention.CudaAttend(on_device, cache, int(batch.seq_lens.max()), exact=exact)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [("as SmolLM2", kind) for kind in KINDS]
    + [(shape, "window and sinks") for shape in SHAPES if shape != "as SmolLM2"],
)
def test_as_torch_attends(shape: str, kind: str) -> None:
    torch.manual_seed(0)
    cache, spans, (q, k, v) = case(shape, torch.float32)
    spec = spec_of(kind, q.shape[1], q.shape[2])
    wanted = TorchAttend(Batch.of(spans), cache, exact=False)(0, q, k, v, spec)
    keys, values = cache.layers[0]
    batch = device_batch.DeviceBatch.of(Batch.of(spans), cache.padding, DEVICE)
    for tokens, splits in ((8, 1), (16, 4)):
        rows = attention.program_rows(tokens, q, keys, values)
        launch = attention.Launch(rows, splits, trees=False)
        found = attention.paged_attention(q, keys, values, batch, spec, launch)
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


def test_two_bytes_a_number() -> None:
    """bf16 on a GPU; float16 in Triton's interpreter, whose products of bf16 are wrong."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    cache, spans, (q, k, v) = case("as SmolLM2", dtype)
    spec = spec_of("sinks", 6, 64)
    found = cuda_attend(spans, cache)(0, q, k, v, spec)
    assert found.dtype == dtype
    exactly = KVCache(BLOCKS, [HeadShape(2, 64, 64)], torch.float32, DEVICE)
    exactly.layers = [tuple(kept.float() for kept in cache.layers[0])]
    floats = [x.float() for x in (q, k, v)]
    wanted = TorchAttend(Batch.of(spans), exactly, exact=False)(0, *floats, spec)
    torch.testing.assert_close(found.float(), wanted, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("exact", [False, True])
def test_rounds_of_two_requests_equal_whole_sequences(exact: bool) -> None:
    """Chunks of a prompt beside single tokens and drafts, written and read through blocks."""
    torch.manual_seed(0)
    spec = AttentionSpec(8**-0.5)
    cache = KVCache(9, [HeadShape(2, 8, 8)], torch.float32, DEVICE)
    whole = [[torch.randn(n, h, 8, device=DEVICE) for h in (4, 2, 2)] for n in (50, 21)]
    blocks = ([7, 2, 0, 5], [1, 6])
    outputs = [list[Tensor](), list[Tensor]()]
    for cuts in (((0, 40), (0, 12)), ((40, 45), (12, 13)), ((45, 50), (13, 21))):
        pairs = zip(blocks, cuts, strict=True)
        spans = [Span(own, low, [0] * (high - low)) for own, (low, high) in pairs]
        packed = []
        for both in zip(*whole, strict=True):
            parts = [x[low:high] for x, (low, high) in zip(both, cuts, strict=True)]
            packed.append(torch.cat(parts))
        out = cuda_attend(spans, cache, exact=exact)(0, *packed, spec)
        for own, part in zip(outputs, out.split([len(s.ids) for s in spans]), strict=True):
            own.append(part)
    for own, qkv in zip(outputs, whole, strict=True):
        torch.testing.assert_close(torch.cat(own), CausalAttend()(0, *qkv, spec))


@pytest.mark.usefixtures("plain_products")
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_exact_rows_do_not_depend_on_each_other(kind: str) -> None:
    torch.manual_seed(0)
    cache, spans, (q, k, v) = case("as SmolLM2", torch.float32)
    spec = spec_of(kind, 6, 64)
    together = cuda_attend(spans, cache, exact=True)(0, q, k, v, spec)
    first = 0
    for span in spans:
        first += len(span.ids)
        own = slice(first - 1, first)
        last = Span(span.blocks, span.start + len(span.ids) - 1, [0])
        alone = cuda_attend([last], cache, exact=True)(0, q[own], k[own], v[own], spec)
        assert torch.equal(alone, together[own])


def test_splits_without_keys_add_nothing() -> None:
    """A short request has no keys for most splits, and its sinks count once."""
    torch.manual_seed(0)
    cache, _, (q, k, v) = case("no groups", torch.float32)
    q, k, v = q[:3], k[:3], v[:3]
    spans = [Span([3], 0, [0]), Span([4, 5], 17, [0, 0])]
    spec = spec_of("sinks", 2, 8)
    wanted = TorchAttend(Batch.of(spans), cache, exact=False)(0, q, k, v, spec)
    batch = device_batch.DeviceBatch.of(Batch.of(spans), cache.padding, DEVICE)
    launch = attention.Launch(16, 8, trees=False)
    found = attention.paged_attention(q, *cache.layers[0], batch, spec, launch)
    torch.testing.assert_close(found, wanted)


def test_every_tile_has_a_program() -> None:
    """Many requests of all lengths around a tile's, and room for more rows and requests."""
    torch.manual_seed(0)
    spans = spans_of([(0, rows) for rows in (8, 1, 16, 17, 7, 9, 15, 3, 24, 1, 1, 8, 25)])
    batch = Batch.of(spans)
    cache = KVCache(BLOCKS, [HeadShape(1, 8, 8)], torch.float32, DEVICE)
    q, k, v = (torch.randn(160, heads, 8, device=DEVICE) for heads in (2, 1, 1))
    spec, rows = AttentionSpec(1.0), len(batch)
    wanted = TorchAttend(batch, cache, exact=False)(0, q[:rows], k[:rows], v[:rows], spec)
    packed = device_batch.pack(batch, 160, 16, cache.padding)
    roomy = device_batch.DeviceBatch(torch.full((1000,), 99, device=DEVICE), 160, 16, trees=False)
    roomy.fill(packed, batch)
    for sizes in ((16, 1), (32, 2)):
        launch = attention.Launch(*sizes, trees=False)
        found = attention.paged_attention(q, *cache.layers[0], roomy, spec, launch)
        torch.testing.assert_close(found[:rows], wanted, atol=2e-6, rtol=1e-5)


def test_pack() -> None:
    """Blocks without keys are left out; rows of padding go to the padding block; no tails."""
    batch = Batch.of([Span([4, 2, 9], 15, [7, 8]), Span([3], 0, [5])])
    packed = device_batch.pack(batch, 4, 4, 10)
    found = device_batch.DeviceBatch(packed, 4, 4, trees=False)
    assert found.ids.tolist() == [7, 8, 5, 0]
    assert found.positions.tolist() == [15, 16, 0, 0]
    assert found.slots.tolist() == [4 * BLOCK + 15, 2 * BLOCK, 3 * BLOCK, 10 * BLOCK]
    assert found.query_starts.tolist() == [0, 2, 3, 3, 3]
    assert found.seq_lens.tolist() == [17, 1, 0, 0]
    assert found.first_blocks.tolist() == [0, 2, 0, 0]
    assert found.longest_tail.tolist() == [0]
    assert found.tables.tolist() == [4, 2, 3]


def test_pack_tails() -> None:
    """They come before the blocks; rows of padding have none."""
    batch = Batch.of([Span([4, 2], 14, [7, 8, 9], [[], [1], [1, 2]]), Span([3], 0, [5])])
    packed = device_batch.pack(batch, 8, 2, 10)
    found = device_batch.DeviceBatch(packed, 8, 2, trees=True)
    assert found.seq_lens.tolist() == [15, 1]
    assert found.longest_tail.tolist() == [2]
    tails = [-1, -1, 4 * BLOCK + 15, -1, 4 * BLOCK + 15, 2 * BLOCK, -1, -1]
    assert found.tables.tolist() == [*tails, 4, 3]
    assert found.first_blocks.tolist() == [8, 9]


COMPILE = Path(__file__).with_name("compile_kernels.py")
# Bytes a thread may spill in bf16: older compilers need more registers (Triton 3.6: 368 on sm_89).
FEW = 128 if tuple(map(int, version("triton").split(".")[:2])) >= (3, 9) else 512


def test_compiles_for_gpus_that_are_not_here() -> None:
    """To machine code, within the shared memory that each has."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(COMPILE)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) == 15 and {name for name, *_ in kernels} == {"sm_80", "sm_89", "sm_90"}
    allowed = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10}
    for gpu, dtype, shared, spilled in kernels:
        assert int(shared) <= allowed[gpu]
        assert int(spilled) <= (FEW if dtype == "bf16" else 1024)
