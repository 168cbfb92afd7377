"""Deterministic mode: a row's bits do not depend on the rows and keys beside it."""

import pytest
import torch
from tiny import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.config import InputError
from peagle.engine.kv_cache import CachedAttend, KVCache, Span
from peagle.engine.llm import LLM
from peagle.model.attend import KEY_BLOCK, ROW_TILE
from peagle.model.target import Target

PREFIX, ROWS = 510, ROW_TILE  # verification crosses a key block of torch's kernel


def wide_target(dtype: torch.dtype) -> Target:
    """Wide enough for the kernels that real models meet."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(config).eval().to(dtype), make_tokenizer(), "wide")


def logits_behind(target: Target, ids: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """Logits of the tokens behind the prefix, run in blocks of these lengths."""
    cache, start, rows = KVCache(1, 1024, KEY_BLOCK), 0, []
    for length in [PREFIX, *blocks]:
        at = torch.arange(start, start + length)
        attend = CachedAttend(cache, [Span(0, start, length)])
        rows.append(target.logits(target.forward(ids[at], at, attend).hidden[-ROWS:]))
        start += length
    return torch.cat(rows[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_one_by_one_and_together(dtype: torch.dtype) -> None:
    target = wide_target(dtype)
    target.row_tile = ROW_TILE
    ids = torch.randint(5, 512, (PREFIX + ROWS,), generator=torch.Generator().manual_seed(1))
    singly = logits_behind(target, ids, [1] * ROWS)
    for blocks in ([ROWS], [1, ROWS - 1], [3, 3, ROWS - 6]):
        assert torch.equal(singly, logits_behind(target, ids, blocks)), blocks


def test_drafts_beyond_a_tile_are_refused(target: Target, drafters) -> None:
    with pytest.raises(InputError, match="at most 7 draft tokens"):
        LLM(target, drafters["p-eagle"], k=ROW_TILE, deterministic=True)


def test_mode_belongs_to_the_engine_not_to_the_target(target: Target) -> None:
    exact, fast = LLM(target, deterministic=True), LLM(target)
    exact.generate([[5, 6, 7]])
    assert target.row_tile == ROW_TILE
    fast.generate([[5, 6, 7]])
    assert target.row_tile == 1
