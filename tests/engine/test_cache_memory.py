"""KV cache memory per token, and measurements before the first request."""

from collections.abc import Sequence

import pytest
import torch
from refusals import refused
from tiny import make_target
from torch import Tensor

from peagle.backends.base import TargetModel
from peagle.backends.batch import Batch
from peagle.backends.choose import choose_backend
from peagle.backends.kv_cache import KVCache
from peagle.backends.tiles import TiledTarget
from peagle.engine import setup
from peagle.engine.adaptive import AdaptiveBudget
from peagle.engine.costs import PROMPT_ROWS, draft_curve, verify_curve
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.setup import SHARE, default_max_batch, token_bytes
from peagle.model.drafter import Drafter
from peagle.model.target import Target, TargetOutput


def test_bytes_of_a_token(target: Target, drafter: Drafter) -> None:
    llm = LLM(target, drafter, k=3, kv_tokens=160)
    llm.generate([[70, 71]], SamplingParams(max_tokens=4))
    held = 0
    proposer = llm.engine.proposer
    assert proposer is not None
    for cache in (llm.engine.cache, proposer.cache):
        for keys, values in cache.layers:
            # The last block is for rows of padding.
            held += (keys[:-1].numel() + values[:-1].numel()) * keys.element_size()
    kept = proposer.features._kept
    held += kept.numel() * kept.element_size()
    assert held == 160 * token_bytes(target, drafter)


@pytest.mark.parametrize(
    ("device", "tokens", "wanted", "batch"),
    [
        ("cpu", 1_000_000, None, 8),
        ("cuda", 1_000_000, None, 64),
        ("cuda", 256 * 40, None, 40),  # the context is 256: no request needs more
        ("cpu", 256 * 3, None, 3),
        ("cpu", 1_000_000, 256 * 5, 5),  # --kv-tokens
        ("cuda", 10, None, 1),
    ],
)
def test_the_default_batch_is_by_device_and_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, tokens: int, wanted: int | None, batch: int
) -> None:
    target = make_target(context=256)
    bytes_free = int(tokens * token_bytes(target, None) / SHARE[device]) + 1
    monkeypatch.setattr(setup, "free_memory", lambda device: bytes_free)
    target.device = torch.device(device)
    assert default_max_batch(target, None, wanted) == batch


def test_memory_that_holds_no_request(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "free_memory", lambda device: 1000)
    with refused():
        setup.kv_tokens(target, None, 256, None)


class Counting:
    """A target's model that notes how many rows it is given."""

    def __init__(self, model: TargetModel) -> None:
        self.model, self.seen = model, set[int]()

    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int]) -> TargetOutput:
        self.seen.add(len(batch))
        return self.model.forward(batch, cache, taps)

    def logits(self, hidden: Tensor, *, largest: bool = False) -> Tensor:
        return self.model.logits(hidden, largest=largest)


@pytest.mark.parametrize("exact", [False, True])
def test_curves_of_the_rows_asked(target: Target, p_eagle: Drafter, exact: bool) -> None:
    """Whether rows come in tiles or not."""
    backend = choose_backend(target.device, target.dtype, exact=exact)
    counting = Counting(backend.target(target))
    verify = verify_curve(target, TiledTarget(counting) if exact else counting, 12)
    assert verify.rows == [1, 2, 4, 5, 8, 9, 12] and all(second > 0 for second in verify.seconds)
    assert counting.seen == ({8} if exact else {1, 2, 4, 5, 8, 9, 12})
    draft = draft_curve(backend.drafter(p_eagle), 6)
    assert draft.rows == [1, 2, 4, 5, 6, PROMPT_ROWS] and all(
        second > 0 for second in draft.seconds
    )


def test_a_target_is_measured_once_for_all_llms(target: Target, drafters) -> None:  # noqa: ANN001
    """Costs that one engine learns do not reach another engine."""
    llm = LLM(target, drafters["p-eagle"], max_batch=2)
    one, two = llm.engine.budget, llm.use(drafters["eagle3"]).engine.budget
    assert isinstance(one, AdaptiveBudget) and isinstance(two, AdaptiveBudget)
    assert one.verify.seconds == two.verify.seconds
    one.verify.observe([1], 9.0)
    assert one.verify.seconds != two.verify.seconds


def test_a_large_cache_costs_what_is_used_of_it(target: Target) -> None:
    """A gigabyte of cache that nobody writes to is not taken from the machine."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    tokens = 2**30 // token_bytes(target, None)
    LLM(target, kv_tokens=tokens).generate([[70, 71]], SamplingParams(max_tokens=4))
    assert resident() - before < 2**28
