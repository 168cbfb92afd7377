"""Targets and drafters on the cuda backend give what they give on the reference backend."""

from typing import Any

import pytest
import torch
from tiny import METHODS, make_drafter

from peagle.backends.batch import Batch, Span
from peagle.backends.kv_cache import KVCache
from peagle.backends.torch import TorchBackend

graphs = pytest.importorskip("peagle.backends.cuda.graphs", reason="no Triton")

from recorders import DEVICE, CountingRecorder, target_on_device  # noqa: E402 (needs Triton)

from peagle.backends.cuda.backend import CudaBackend  # noqa: E402 (needs Triton)

# Two requests: their prompts, then drafts to verify, then other numbers of rows; then draft trees.
ROUNDS = [
    [Span([3, 5], 0, [7, 8, 9] * 3), Span([1], 0, [20, 21])],
    [Span([3, 5], 9, [4, 5, 6]), Span([1], 2, [30, 31, 32])],
    [Span([3, 5], 12, [9, 8, 7, 6, 5]), Span([1], 4, [33])],
]
TREES = [
    [Span([3, 5], 14, [4, 5, 6, 7], [[], [1], [1, 2], [3]]), Span([1], 5, [30, 31])],
    [Span([3, 5], 16, [9, 8]), Span([1], 6, [7, 6, 5, 4], [[], [1], [2], [2, 3]])],
]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    CountingRecorder.count = 0
    monkeypatch.setattr(graphs, "Recorder", CountingRecorder)


def cache_of(model: Any) -> KVCache:
    return KVCache(7, model.kv_shapes, torch.float32, DEVICE)


@pytest.mark.parametrize("exact", [False, True])
def test_a_target(exact: bool) -> None:
    target = target_on_device()
    made = CudaBackend(exact=exact).target(target)
    reference = TorchBackend(exact=exact).target(target)
    caches = cache_of(target), cache_of(target)
    for spans in [*ROUNDS, *TREES]:
        batch = Batch.of(spans)
        found = made.forward(batch, caches[0], [0, 1])
        wanted = reference.forward(batch, caches[1], [0, 1])
        torch.testing.assert_close(found.hidden, wanted.hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.features, wanted.features, atol=1e-5, rtol=1e-5)
        logits = made.logits(found.hidden), reference.logits(wanted.hidden)
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert CountingRecorder.count == 2  # with trees and without


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter(method: Any) -> None:
    torch.manual_seed(0)
    target = target_on_device()
    drafter = make_drafter(target, method, layers=2).to(DEVICE)
    drafter.share_embedding(target.embedding)
    made, reference = CudaBackend().drafter(drafter), TorchBackend().drafter(drafter)
    caches = cache_of(drafter), cache_of(drafter)
    for spans in ROUNDS:
        batch = Batch.of(spans)
        features = torch.randn(len(batch), drafter.config.feature_width, device=DEVICE)
        projected = drafter.project(features)
        found = made.forward(batch, projected, caches[0])
        wanted = reference.forward(batch, projected, caches[1])
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert CountingRecorder.count == 1
