"""Deterministic mode: a row's bits do not depend on the rows and keys beside it."""

import pytest
import torch
from oracle import Oracle
from tiny import METHODS, make_drafter, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.backends.batch import BLOCK, Batch, Span
from peagle.backends.choose import choose_backend
from peagle.backends.kv_cache import KVCache
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.target import Target

PREFIX, ROWS = 510, 12  # verification crosses a key block of torch's kernel


def wide_target(dtype: torch.dtype) -> Target:
    """Wide enough for the kernels that real models meet."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(config).eval().to(dtype), make_tokenizer(), "wide")


def logits_behind(target: Target, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Logits of the tokens behind the prefix, run so many at a time in the deterministic mode."""
    blocks = range(-(-len(ids) // BLOCK))
    cache = KVCache(len(blocks), target.kv_shapes, target.dtype, target.device)
    model = choose_backend(target.device, target.dtype, exact=True).target(target)
    start, rows = 0, list[torch.Tensor]()
    for length in [PREFIX, *lengths]:
        batch = Batch.of([Span(blocks, start, ids[start : start + length].tolist())])
        hidden = model.forward(batch, cache, ()).hidden
        if start:
            rows.append(model.logits(hidden))
        start += length
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_one_by_one_and_together(dtype: torch.dtype) -> None:
    target = wide_target(dtype)
    ids = torch.randint(5, 512, (PREFIX + ROWS,), generator=torch.Generator().manual_seed(1))
    singly = logits_behind(target, ids, [1] * ROWS)
    for lengths in ([ROWS], [1, ROWS - 1], [3, 3, ROWS - 6], [9, ROWS - 9]):
        assert torch.equal(singly, logits_behind(target, ids, lengths)), lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_each_request_alone(dtype: torch.dtype, method: str) -> None:
    """Any batch, any K, any chunks, blocks found again or not: the very same ids."""
    target = wide_target(dtype)
    drafter = make_drafter(target, method).to(dtype)
    generator = torch.Generator().manual_seed(2)
    lengths = [30, 3, 17, 5]
    prompts = [torch.randint(5, 512, (n,), generator=generator).tolist() for n in lengths]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 20, 5, 16)]
    exact = LLM(target, deterministic=True, max_batch=1, lookup=False)
    alone = [exact.generate([p], own)[0].token_ids for p, own in zip(prompts, params, strict=True)]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    for k, batch, times in ((None, 4, 1), (11, 3, 2)):
        llm = LLM(target, drafter, k=k, deterministic=True, max_batch=batch)
        for _ in range(times):  # the second time prompts are found in the cache
            found = [done.token_ids for done in llm.generate(prompts, params)]
            assert found == alone, (k, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_accepted_drafts_change_no_token(dtype: torch.dtype, batch: int, oracle: Oracle) -> None:
    target = wide_target(dtype)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(5, 512, (n,), generator=generator).tolist() for n in (21, 6, 33)]
    exact = LLM(target, deterministic=True, max_batch=1, lookup=False)
    longer = SamplingParams(max_tokens=40, ignore_eos=True)
    said = [exact.generate([prompt], longer)[0].token_ids for prompt in prompts]
    oracle.futures = [p + answer for p, answer in zip(prompts, said, strict=True)]
    oracle.error_rate = 0.3
    drafter = make_drafter(target, "p-eagle").to(dtype)
    llm = LLM(target, drafter, k=5, deterministic=True, max_batch=batch)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert [done.token_ids for done in llm.generate(prompts, params)] == [s[:30] for s in said]
    assert sum(map(sum, oracle.hits.values())) > 20
