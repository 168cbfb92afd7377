"""What runs on a GPU has there all it multiplies: shown without one, by tensors that know nothing
but their device. (Values, and what brings them to the host, they do not have.)"""

from collections.abc import Iterator

import pytest
import torch
from tiny import METHODS, make_drafter, make_target
from torch import Tensor
from torch._subclasses import FakeTensorMode

from peagle.engine.draft import NewSlots, _autoregressive, _parallel, _projected
from peagle.engine.kv_cache import CachedAttend, KVCache, Span, positions
from peagle.engine.request import SamplingParams
from peagle.engine.sampling import Sampler
from peagle.model.attend import AttentionSpec
from peagle.model.drafter import Drafter
from peagle.model.target import Target

GPU = torch.device("meta")  # fake tensors of cuda cannot be sliced where torch has none
SPANS = {
    "a prompt": [Span([0, 1, 2], 0, 40)],
    "several drafts": [Span([0, 3], 20, 4), Span([1, 2], 18, 4), Span([4, 5], 30, 1)],
    "drafts beside a prompt": [Span([0, 3], 20, 4), Span([5, 6], 21, 4), Span([2, 1, 4], 0, 40)],
}


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):  # weights made before
        yield


def on_gpu(*shape: int) -> Tensor:
    return torch.empty(*shape, device=GPU)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("kind", ["plain", "window", "capped", "sinks"])
def test_attention(spans: list[Span], tiled: bool, kind: str) -> None:
    sinks = on_gpu(4) if kind == "sinks" else None
    spec = AttentionSpec(
        1.0, 16 if kind == "window" else None, 2.0 if kind == "capped" else None, sinks
    )
    tokens = sum(span.length for span in spans)
    attend = CachedAttend(KVCache(8, 16), spans, tiled=tiled)
    out = attend(0, on_gpu(tokens, 4, 8), on_gpu(tokens, 2, 8), on_gpu(tokens, 2, 8), spec)
    assert out.device == GPU and out.shape == (tokens, 4, 8)


@pytest.fixture(scope="module", params=METHODS)
def models(request: pytest.FixtureRequest) -> tuple[Target, Drafter]:
    """On the GPU; made before anything is fake."""
    target = make_target()
    drafter = make_drafter(target, request.param)
    target.model.to(GPU)
    target.device = GPU
    drafter.share_embedding(target.embedding)
    return target, drafter.to(GPU)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_a_round(models: tuple[Target, Drafter], spans: list[Span]) -> None:
    """Verification and drafts; only what is brought to the host is left out."""
    target, drafter = models
    target.tap(drafter.config.feature_layers)
    tokens = sum(span.length for span in spans)
    ids = torch.zeros(tokens, dtype=torch.int64, device=GPU)
    out = target.forward(ids, positions(spans, GPU), CachedAttend(KVCache(8, 16), spans))
    assert out.features is not None
    assert target.logits(out.hidden[-2:]).device == GPU
    parts = out.features.split([span.length for span in spans])
    slots = [
        NewSlots([*span.blocks, 7], span.start, [5] * span.length, part, depth)
        for span, part, depth in zip(spans, parts, (3, 2, 1), strict=False)
    ]
    features = _projected(drafter, [out.features])
    run = _parallel if drafter.config.method == "p-eagle" else _autoregressive
    drafts = run(drafter, KVCache(8, 16), slots, features, [None] * len(slots))
    assert all(draft.tokens.device == draft.sure.device == GPU for draft in drafts)


def test_sampling() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, logit_bias={3: 1.0},
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5,
    )  # fmt: skip
    rows = Sampler(params, [5, 6], torch.Generator(), 64)._rows(on_gpu(3, 64), [7, 8])
    assert rows.device == GPU
