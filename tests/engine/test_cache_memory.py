"""What a token of KV cache takes, and what is measured before anything runs."""

import pytest
import torch
from tiny import METHODS, make_target

from peagle.engine import memory
from peagle.engine.costs import draft_curve, verify_curve
from peagle.engine.depth import PROMPT
from peagle.engine.llm import LLM
from peagle.engine.memory import SHARE, default_max_batch, token_bytes
from peagle.engine.request import SamplingParams
from peagle.model.config import Method
from peagle.model.drafter import Drafter
from peagle.model.target import Target


@pytest.mark.parametrize("method", METHODS)
def test_token_bytes_are_what_the_caches_hold(
    target: Target, drafters: dict[Method, Drafter], method: Method
) -> None:
    llm = LLM(target, drafters[method], k=3, kv_tokens=160)
    llm.generate([[70, 71]], SamplingParams(max_tokens=4))
    held = 0
    for cache in (llm.engine.target_cache, llm.engine.drafter_cache):
        for keys, values in cache._layers.values():
            # The last block is for rows of padding.
            held += (keys[:-1].numel() + values[:-1].numel()) * keys.element_size()
    kept = llm.engine.features._kept
    assert kept is not None
    held += kept.numel() * kept.element_size()
    assert held == 160 * token_bytes(target, drafters[method])


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
    monkeypatch.setattr(memory, "free_memory", lambda device: bytes_free)
    target.device = torch.device(device)
    assert default_max_batch(target, None, wanted) == batch


@pytest.mark.parametrize("exact", [False, True])
def test_curves_are_of_the_rows_asked_for(
    target: Target, drafters: dict[Method, Drafter], exact: bool
) -> None:
    """Whether the target has features to give, and whether its rows come in tiles or not."""
    seen = list[int]()
    hook = target.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    target.exact(exact)
    verify = verify_curve(target, 12)
    target.exact(False)
    hook.remove()
    assert verify.rows == [1, 2, 4, 8, 12] and all(second > 0 for second in verify.seconds)
    assert set(seen) == ({8} if exact else {1, 2, 4, 8, 12})
    draft = draft_curve(drafters["p-eagle"], 6)
    assert draft.rows == [1, 2, 4, 6, PROMPT] and all(second > 0 for second in draft.seconds)


def test_a_large_cache_costs_what_is_used_of_it(target: Target) -> None:
    """A gigabyte of cache that nobody writes to is not taken from the machine."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    tokens = 2**30 // token_bytes(target, None)
    LLM(target, kv_tokens=tokens).generate([[70, 71]], SamplingParams(max_tokens=4))
    assert resident() - before < 2**28
