"""Native code: what torch computes, within rounding, whatever rows stand beside a row."""

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import PLAIN, build
from tiny import make_drafter, make_target
from tiny_heads import head_config
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from peagle.engine.kv_cache import CachedAttend, KVCache, Span, positions
from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams
from peagle.model import native
from peagle.model.attend import AttentionSpec, attention, causal_mask
from peagle.model.drafter import Drafter
from peagle.model.layers import Norm, Rotation
from peagle.model.lean import LeanLayer
from peagle.model.packed import pack
from peagle.model.target import Target

DTYPES = (torch.float32, torch.bfloat16)
STEP = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}  # a unit or two in the last place
BASELINE = "x86-64-v2"  # no AVX: every vector of 16 floats is four


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(params=("native", BASELINE))
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library for this processor, and for one that has little."""
    if request.param == BASELINE:
        if "x86" not in native.platform.machine():
            pytest.skip("this processor is no x86")
        flags = [f"-march={BASELINE}" if "march" in flag else flag for flag in native.FLAGS]
        monkeypatch.setattr(native, "FLAGS", flags)
    _forget()
    if native.library() is None:
        pytest.skip("no C++ compiler here")
    yield
    _forget()


def _forget() -> None:
    for cached in (native.library, native.function, native.tiles):
        cached.cache_clear()


def close(found: Tensor, exact: Tensor) -> None:
    assert found.dtype in DTYPES
    bound = exact.abs() * STEP[found.dtype] + 1e-6
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 63, 576])
def test_norm(dtype: torch.dtype, width: int) -> None:
    norm = Norm(width, 1e-5)
    norm.weight.data.normal_(mean=1.0, std=0.5)
    norm = norm.to(dtype)
    for scale in (1e-4, 1.0, 300.0):  # the least is about as large as the root of eps
        x = scale * torch.randn(2, 40, width).to(dtype)
        assert native.usable(x, norm.weight)
        close(norm(x), F.rms_norm(x.double(), (width,), norm.weight.double(), 1e-5))
        assert torch.equal(norm(x[0, :1]), norm(x)[0, :1]), "a row by itself"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    angle = torch.rand(1, 37, 24) * 6
    rotate = Rotation.of(angle.cos().to(dtype), angle.sin().to(dtype))
    x = torch.randn(37, 3, 24).to(dtype)
    found = rotate(x)
    monkeypatch.setattr(native, "usable", lambda *_: False)
    torch.testing.assert_close(found, rotate(x), rtol=STEP[dtype], atol=1e-6)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype: torch.dtype) -> None:
    x, up = (10 * torch.randn(40, 100).to(dtype) for _ in range(2))
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    exact = F.silu(x.double()) * up.double()
    found = native.gate(x, up)
    assert ((found.double() - exact).abs() <= exact.abs() * 2 * STEP[dtype] + 1e-6).all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.3),
        AttentionSpec(0.3, window=21),
        AttentionSpec(0.3, softcap=2.0),
        AttentionSpec(0.3, window=1, sinks=torch.randn(6)),
    ],
)
@pytest.mark.parametrize("sizes", [(6, 2, 16, 16), (6, 6, 10, 7), (6, 1, 64, 64)])
def test_attention(dtype: torch.dtype, spec: AttentionSpec, sizes: tuple[int, ...]) -> None:
    """Spans of every length beside each other, their blocks scattered."""
    heads, kv_heads, key_width, value_width = sizes
    cache, free = KVCache(64, 16), torch.randperm(64).tolist()
    lengths = [(0, 1), (15, 1), (16, 5), (40, 9), (100, 32), (3, 40)]
    past = []
    for start, length in lengths:
        blocks = [free.pop() for _ in range(-(-(start + length) // 16))]
        k = torch.randn(start + length, kv_heads, key_width).to(dtype)
        v = torch.randn(start + length, kv_heads, value_width).to(dtype)
        q = torch.randn(length, heads, key_width).to(dtype)
        if start:
            attend = CachedAttend(cache, [Span(blocks, 0, start)])
            attend(0, q.new_zeros(start, heads, key_width), k[:start], v[:start], spec)
        past.append((Span(blocks, start, length), q, k, v))
    spans = [span for span, *_ in past]
    new = [torch.cat([x[-span.length :] for x, span in zip(parts, spans, strict=True)])
           for parts in list(zip(*past, strict=True))[1:]]  # fmt: skip
    together = CachedAttend(cache, spans)(0, *new, spec).split([s.length for s in spans])
    for (span, q, k, v), found in zip(past, together, strict=True):
        exact = _exact(span, q, k, v, spec)
        assert ((found.double() - exact).abs() <= 4 * STEP[dtype] * exact.abs().amax()).all()
        if span.length <= 32:
            tail = [x[-1:] for x in (q, k, v)]
            last = Span(span.blocks, span.end - 1, 1)
            assert torch.equal(CachedAttend(cache, [last])(0, *tail, spec)[0], found[-1])


def _exact(span: Span, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    mask = causal_mask(span.start, span.length, spec.window, q.device)
    sinks = None if spec.sinks is None else spec.sinks.double()
    return attention(q.double(), k.double(), v.double(), mask, spec._replace(sinks=sinks))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_whole_layer_is_its_parts(
    family: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, and so is what it leaves in the cache."""
    if not native.tiles():
        pytest.skip("this CPU has no tiles (AMX)")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**PLAIN | sizes)
    target = Target(build(config).bfloat16(), None, family).lean().pack()
    assert all(isinstance(layer, LeanLayer) and layer.weights for layer in target.layers)
    target.tap((0, 2))
    target.exact(exact)  # with rows of padding
    calls = _calls(monkeypatch)
    rounds = [[(0, 5), (0, 1)], [(5, 1), (1, 32)], [(6, 8), (33, 2)], [(14, 40), (35, 1)]]
    found = []
    for paged in (CachedAttend.paged, lambda *_: None):
        monkeypatch.setattr(CachedAttend, "paged", paged)
        cache, outs = KVCache(16, 16), []
        for number, parts in enumerate(rounds):
            spans = [Span(b, *p) for b, p in zip(([9, 3, 4, 7], [1, 0, 5]), parts, strict=True)]
            at = positions(spans, torch.device("cpu"))
            ids = torch.arange(len(at)) + number
            out = target.forward(ids, at, CachedAttend(cache, spans, tiled=exact))
            outs += [out.hidden, out.features, *(x.clone() for x in cache.layer(3, at, at))]
        found.append(outs)
    assert calls == 3 * [4], "all layers at once; a long span is for torch"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_head_is_its_parts(family: str, normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: its first layer, which reads two inputs, and those behind it."""
    if not native.tiles():
        pytest.skip("this CPU has no tiles (AMX)")
    sizes = {"intermediate_size": 64}
    config = head_config(kind=family, sizes=sizes, norm_before_residual=normed)
    drafter = Drafter(config).bfloat16().eval()
    for parameter in drafter.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    pack(drafter)
    calls, found = _calls(monkeypatch), []
    features = torch.randn(9, 32).bfloat16()
    for paged in (CachedAttend.paged, lambda *_: None):
        monkeypatch.setattr(CachedAttend, "paged", paged)
        cache, outs = KVCache(4, 16), []
        for spans in ([Span([2], 0, 6), Span([0, 3], 0, 3)], [Span([2], 4, 2), Span([0, 3], 3, 7)]):
            at = positions(spans, torch.device("cpu"))
            out = drafter(at + 5, features[: len(at)], at, CachedAttend(cache, spans))
            outs += [*out, *(x.clone() for x in cache.layer(2, at, at))]
        found.append(outs)
    assert calls == [3, 3]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers of each native call from now on."""
    calls, run = list[int](), native.layers

    def note(x: Tensor, weights: list[native.LayerWeights], *rest: Any, **more: Any) -> Any:
        calls.append(len(weights))
        return run(x, weights, *rest, **more)

    monkeypatch.setattr(native, "layers", note)
    return calls


def test_what_it_does_not_take() -> None:
    x = torch.randn(4, 32)
    if native.library() is None:
        pytest.skip("no C++ compiler here")
    assert native.usable(x, x)
    assert not native.usable(x.half()) and not native.usable(x, x.bfloat16())
    assert not native.usable(x.T) and not native.usable(x.to("meta"))
    with torch.enable_grad():
        assert not native.usable(x), "gradients do not pass"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_same_is_said(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line tells of it, and nothing half-made is left."""
    target = make_target()
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    def say() -> list[list[int]]:
        llm = LLM(target, make_drafter(target, "p-eagle"), k=3)
        return [a.token_ids for a in llm.generate([[5, 6, 7], [9, 8]], params)]

    said = say()
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "peagle"))
    _forget()
    with caplog.at_level(logging.WARNING):
        assert say() == said
    assert native.library() is None and not native.tiles()
    _forget()
    assert len(caplog.messages) == 1 and "slower without native code" in caplog.messages[0]
    assert not list((tmp_path / "peagle").iterdir())


def test_the_library_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "peagle"))
    _forget()
    if native.library() is None:
        pytest.skip("no C++ compiler here")
    (made,) = (tmp_path / "peagle").iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    _forget()
    assert native.library() is not None and made.suffix == ".so"
    _forget()
