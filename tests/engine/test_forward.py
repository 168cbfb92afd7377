"""Recorded forwards: what lies at fixed places is all that a replay reads. Where there is no GPU,
CUDA's recordings are played by running the function again, over the same places."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import METHODS, make_drafter, make_target
from torch import Tensor

from peagle.engine import forward as forwards
from peagle.engine import kv_cache
from peagle.engine.forward import ROWS, forward, rounded
from peagle.engine.kv_cache import KVCache, Span
from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams
from peagle.model.target import Target

paged_attention = pytest.importorskip("peagle.engine.paged_attention", reason="no Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 16
recordings = list[Any]()
by_cuda = forwards.record


def noted(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    made = by_cuda(run) if DEVICE.type == "cuda" else played(run)
    recordings.append(made)
    return made


def played(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """As CUDA has it: run once to warm up, recorded without being run, its results then at their
    places."""
    run()
    outputs = run()
    kept = [out for out in outputs if out is not None]
    for out in kept:
        out.fill_(float("nan"))  # nobody may read what has not been played

    def replay() -> None:
        for out, new in zip(kept, [x for x in run() if x is not None], strict=True):
            out.copy_(new)

    return replay, outputs


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings.clear()
    monkeypatch.setattr(forwards, "kernels", lambda _: paged_attention)
    monkeypatch.setattr(kv_cache, "kernels", lambda _: paged_attention)
    monkeypatch.setattr(forwards, "record", noted)


def target_of(**sizes: int) -> Target:
    target = make_target(layers=2, **sizes)
    target.model.to(DEVICE)
    target.device = DEVICE
    return target


# Fewer rows and spans than a recording has room for, and as many; blocks that lie anywhere.
ROUNDS = [
    [Span([3, 5], 0, 9), Span([1], 0, 7)],
    [Span([3, 5], 9, 2), Span([1], 7, 3), Span([0, 6], 0, 3)],
    [Span([3, 5], 11, 4), Span([1], 10, 1), Span([0, 6], 3, 14)],
    [Span([3, 5], 15, 3), Span([0, 6], 17, 1), Span([1], 11, 4)],
]


@pytest.mark.usefixtures("recorded")
def test_replays_equal_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    target.tap((0, 1))
    found = run_rounds(target.forward, ROUNDS)
    assert len(recordings) == 3  # 16 rows of 2 spans; 8 of 4, twice; 32 of 4
    monkeypatch.setattr(forwards, "kernels", lambda _: None)
    monkeypatch.setattr(kv_cache, "kernels", lambda _: None)
    wanted = run_rounds(target.forward, ROUNDS)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


def run_rounds(model: Any, rounds: list[list[Span]]) -> list[Tensor]:
    generator, cache, outputs = torch.Generator().manual_seed(0), KVCache(7, SIZE), []
    for spans in rounds:
        ids = torch.randint(128, (sum(s.length for s in spans),), generator=generator)
        with torch.no_grad():
            out = forward(model, cache, spans, ids.to(DEVICE))
        outputs += [out.hidden.clone(), out.features.clone()]
    return outputs


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_an_engine_says_the_same(
    method: Any, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of()
    drafter = make_drafter(target, method, layers=1).to(DEVICE)
    drafter.share_embedding(target.embedding)
    prompts, params = [[7, 8, 9], [20, 21]], SamplingParams(max_tokens=4, ignore_eos=True)

    def decode() -> list[list[int]]:
        llm = LLM(target, drafter, k=2, kv_tokens=256, max_batch=2, deterministic=deterministic)
        return [done.token_ids for done in llm.generate(prompts, params)]

    found = decode()
    assert recordings
    monkeypatch.setattr(forwards, "kernels", lambda _: None)
    monkeypatch.setattr(kv_cache, "kernels", lambda _: None)
    assert decode() == found


@pytest.mark.usefixtures("recorded")
def test_what_cannot_be_recorded_is_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand much more")

    monkeypatch.setattr(forwards, "record", refused)
    target = target_of()
    target.tap((0,))
    found = run_rounds(target.forward, ROUNDS[:2])
    assert all(out.isfinite().all() for out in found)
    assert caplog.messages == [
        "slower without CUDA graphs: operation not permitted when stream is capturing"
    ]


@pytest.mark.usefixtures("recorded")
def test_long_forwards_are_not_recorded() -> None:
    target = target_of(context=512)
    cache, many = KVCache(20, SIZE), torch.zeros(ROWS + 1, dtype=torch.int64, device=DEVICE)
    with torch.no_grad():
        forward(target.forward, cache, [Span(range(20), 0, ROWS + 1)], many)
    assert not recordings


def test_rounded() -> None:
    found = [rounded(count) for count in (1, 2, 3, 8, 9, 16, 17, 33, 256)]
    assert found == [1, 2, 4, 8, 16, 16, 32, 48, 256]
