"""The GPU's attention: the same numbers as torch's, by Triton's interpreter where there is no GPU,
and what is made of it for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.engine import kv_cache
from peagle.engine.kv_cache import CachedAttend, KVCache, Span
from peagle.model.attend import AttentionSpec, CausalAttend

paged_attention = pytest.importorskip("peagle.engine.paged_attention", reason="no Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, SIZE = 30, 16
# One token behind a long past, a draft, a prompt of several tiles, one key.
SPANS = [(70, 1), (20, 5), (2, 23), (0, 1)]
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


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device were a GPU."""
    monkeypatch.setattr(kv_cache, "kernels", lambda _: paged_attention)


def spec_of(kind: str, heads: int, size: int) -> AttentionSpec:
    more = dict(KINDS[kind])
    if "sinks" in more:
        more["sinks"] = torch.randn(heads, device=DEVICE)
    return AttentionSpec(size**-0.5, **more)


def table_of(attend: CachedAttend, *key: int) -> Any:
    return paged_attention.Table.of(attend.packed(), SIZE, *key, DEVICE)


def case(shape: str, dtype: torch.dtype) -> tuple[KVCache, list[Span], list[Tensor]]:
    """A full cache, spans whose blocks lie anywhere, and their queries, keys and values."""
    heads, kv_heads, *sizes = SHAPES[shape]
    cache, free = KVCache(BLOCKS, SIZE), torch.randperm(BLOCKS).tolist()
    spans = [Span([free.pop() for _ in range(-(-(a + n) // SIZE))], a, n) for a, n in SPANS]
    tokens = sum(span.length for span in spans)
    k, v = (torch.randn(tokens, kv_heads, size, device=DEVICE, dtype=dtype) for size in sizes)
    for kept in cache.layer(0, k, v):
        kept.normal_()
    return cache, spans, [torch.randn(tokens, heads, sizes[0], device=DEVICE).to(dtype), k, v]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [("as SmolLM2", kind) for kind in KINDS] + [(shape, "window and sinks") for shape in SHAPES],
)
def test_as_torch_attends(shape: str, kind: str) -> None:
    torch.manual_seed(0)
    cache, spans, (q, k, v) = case(shape, torch.float32)
    spec = spec_of(kind, q.shape[1], q.shape[2])
    attend = CachedAttend(cache, spans)
    keys, values = cache.layer(0, k, v)
    rows = paged_attention.rows_for(16, q, keys, values)
    table = table_of(attend, rows, q.shape[1] // k.shape[1])
    wanted = attend._by_torch(q, keys, values, spec)
    for splits in (1, 4):
        found = paged_attention.attend(q, keys, values, table, spec, splits)
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


def test_two_bytes_a_number() -> None:
    """bf16 on a GPU; float16 in Triton's interpreter, whose products of bf16 are wrong."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    cache, spans, (q, k, v) = case("as SmolLM2", dtype)
    keys, values = cache.layer(0, k, v)
    attend = CachedAttend(cache, spans)
    table = table_of(attend, paged_attention.rows_for(16, q, keys, values), 3)
    spec = spec_of("sinks", 6, 64)
    found = paged_attention.attend(q, keys, values, table, spec, None)
    wanted = attend._by_torch(*(x.float() for x in (q, keys, values)), spec)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, atol=0.01, rtol=0.01)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("tiled", [False, True])
def test_rounds_of_two_requests_equal_whole_sequences(tiled: bool) -> None:
    """Chunks of a prompt beside single tokens and drafts, written and read through blocks."""
    torch.manual_seed(0)
    spec, cache = AttentionSpec(8**-0.5), KVCache(9, SIZE)
    heads = (4, 2, 2)
    whole = [[torch.randn(n, h, 8, device=DEVICE) for h in heads] for n in (50, 21)]
    rows = ([7, 2, 0, 5], [1, 6])
    outputs = [list[Tensor](), list[Tensor]()]
    for cuts in (((0, 40), (0, 12)), ((40, 45), (12, 13)), ((45, 50), (13, 21))):
        spans = [Span(own, lo, hi - lo) for own, (lo, hi) in zip(rows, cuts, strict=True)]
        packed = [
            torch.cat([x[lo:hi] for x, (lo, hi) in zip(kind, cuts, strict=True)])
            for kind in zip(*whole, strict=True)
        ]
        out = CachedAttend(cache, spans, tiled=tiled)(0, *packed, spec)
        for mine, part in zip(outputs, out.split([s.length for s in spans]), strict=True):
            mine.append(part)
    for mine, qkv in zip(outputs, whole, strict=True):
        torch.testing.assert_close(torch.cat(mine), CausalAttend()(0, *qkv, spec))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_in_the_deterministic_mode_rows_do_not_know_of_each_other(kind: str) -> None:
    torch.manual_seed(0)
    cache, spans, (q, k, v) = case("as SmolLM2", torch.float32)
    spec = spec_of(kind, 6, 64)
    together = CachedAttend(cache, spans, tiled=True)(0, q, k, v, spec)
    at = 0
    for span in spans:
        last = Span(span.blocks, span.end - 1, 1)
        at += span.length
        alone = CachedAttend(cache, [last], tiled=True)(
            0, *(x[at - 1 : at] for x in (q, k, v)), spec
        )
        assert torch.equal(alone, together[at - 1 : at])


def test_what_ends_before_a_split_is_not_a_number_of_it() -> None:
    """Splits that a short span has no keys for leave nothing in its sum, nor in its sinks."""
    torch.manual_seed(0)
    cache, _, (q, k, v) = case("no groups", torch.float32)
    keys, values = cache.layer(0, k, v)
    spans, spec = [Span([3], 0, 1), Span([4, 5], 17, 2)], spec_of("sinks", 2, 8)
    attend = CachedAttend(cache, spans)
    table = table_of(attend, 16, 1)
    found = paged_attention.attend(q[:3], keys, values, table, spec, 8)
    wanted = attend._by_torch(q[:3], keys, values, spec)
    torch.testing.assert_close(found, wanted)


COMPILE = Path(__file__).with_name("compile_kernels.py")


def test_compiles_for_gpus_that_are_not_here() -> None:
    """To machine code, within the shared memory that each has."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(COMPILE)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) == 10 and {name for name, *_ in kernels} == {"sm_80", "sm_89", "sm_90"}
    allowed = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10}
    for gpu, dtype, shared, spilled in kernels:
        assert int(shared) <= allowed[gpu]
        assert int(spilled) <= (128 if dtype == "bf16" else 1024)  # bytes a thread
