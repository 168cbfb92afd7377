"""All operands of a model on a GPU are on that GPU. Fake tensors show it without one: they have a
device but no values, so a copy to the host fails."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from tiny import METHODS, chain, make_drafter, make_target
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from peagle.backends import torch as reference
from peagle.backends.batch import Batch, Span
from peagle.backends.kv_cache import FeatureCache, KVCache
from peagle.backends.torch import TorchAttend, TorchBackend, View
from peagle.engine.draft import Proposer
from peagle.engine.params import SamplingParams
from peagle.engine.sampling import Sampler
from peagle.methods.base import DraftPass, NewSlots, advance
from peagle.methods.registry import method_of
from peagle.model.attention import AttentionSpec, HeadShape
from peagle.model.drafter import Drafter
from peagle.model.target import Target

GPU = torch.device("meta")  # fake tensors of cuda cannot be sliced where torch has none
SPANS = {
    "a prompt": [Span([0, 1, 2], 0, [5] * 40)],
    "several drafts": [
        Span([0, 3], 20, [5] * 4), Span([1, 2], 18, [5] * 4), Span([4, 5], 30, [5]),
    ],
    "drafts beside a prompt": [
        Span([0, 3], 20, [5] * 4), Span([5, 6], 21, [5] * 4), Span([2, 1, 4], 0, [5] * 40),
    ],
}  # fmt: skip
TREE = [[], [1], [2], [1, 3]]
EVERY_KIND = [*SPANS["drafts beside a prompt"], Span([7], 9, [5] * 4, TREE)]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the slot mapping real: it is on the host and has values."""
    batch_of, views = Batch.of, reference.views

    def real_batch(spans: Sequence[Span], ids: Tensor | None = None) -> Batch:
        with unset_fake_temporarily():
            return batch_of(spans, ids)

    def real_views(batch: Batch) -> list[View]:
        with unset_fake_temporarily():
            return list(views(batch))

    monkeypatch.setattr(Batch, "of", real_batch)
    monkeypatch.setattr(reference, "views", real_views)
    with FakeTensorMode(allow_non_fake_inputs=True):  # weights made before
        yield


def on_gpu(*shape: int) -> Tensor:
    return torch.empty(*shape, device=GPU)


def test_the_check_notices_what_is_on_the_host() -> None:
    with pytest.raises(RuntimeError, match="device"):
        on_gpu(3) + torch.empty(3)


@pytest.mark.parametrize("spans", [*SPANS.values(), EVERY_KIND], ids=[*SPANS, "trees too"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["plain", "window", "capped", "sinks"])
def test_attention(spans: list[Span], exact: bool, kind: str) -> None:
    sinks = on_gpu(4) if kind == "sinks" else None
    spec = AttentionSpec(
        1.0, 16 if kind == "window" else None, 2.0 if kind == "capped" else None, sinks
    )
    batch = Batch.of(spans)
    cache = KVCache(8, [HeadShape(2, 8, 8)], torch.float32, GPU)
    attend = TorchAttend(batch, cache, exact=exact)
    rows = len(batch)
    out = attend(0, on_gpu(rows, 4, 8), on_gpu(rows, 2, 8), on_gpu(rows, 2, 8), spec)
    assert out.device == GPU and out.shape == (rows, 4, 8)


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
    config, backend = drafter.config, TorchBackend()
    batch = Batch.of(spans)
    cache = KVCache(8, target.kv_shapes, target.dtype, GPU)
    model = backend.target(target)
    out = model.forward(batch, cache, config.feature_layers)
    assert model.logits(out.hidden[-2:]).device == GPU
    features = FeatureCache(8, config.feature_width, target.dtype, GPU)
    features.write(batch.slot_mapping, out.features)
    drafters_cache = KVCache(8, drafter.kv_shapes, target.dtype, GPU)
    proposer = Proposer(method_of(config), backend.drafter(drafter), drafters_cache, features)
    slots = [
        NewSlots([*span.blocks, 7], span.start, list(span.ids), depth)
        for span, depth in zip(spans, (3, 2, 1), strict=False)
    ]
    kept = features.read(batch.slot_mapping)
    steps = proposer.method.draft(DraftPass(proposer.model, drafters_cache, slots, kept))
    drafted, drafts = next(steps, None), 0
    while drafted is not None:
        logits = proposer.method.logits(drafter, drafted.normed, None)
        assert logits.device == GPU and len(logits) == len(drafted.owners)
        drafts += len(logits)
        drafted = advance(steps, drafter.target_ids[logits.argmax(-1)])
    assert drafts == sum(new.depth for new in slots)


def test_sampling() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, logit_bias={3: 1.0},
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5,
    )  # fmt: skip
    rows = Sampler(params, [5, 6], torch.Generator(), 64)._rows(on_gpu(3, 64), chain([7, 8]))
    assert rows.device == GPU
