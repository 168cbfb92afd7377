"""A target with quantised weights is like any other: drafting changes nothing."""

import warnings
from pathlib import Path

import pytest
import torch
from families import PLAIN, build
from oracle import Oracle
from test_deterministic import logits_behind, wide_target
from tiny import METHODS, make_drafter, make_tokenizer, random_prompts, save_target
from transformers import LlamaConfig

from peagle.backends.cpu.quantized import KINDS, quantize
from peagle.backends.tiles import ROW_TILE
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.errors import InputWarning
from peagle.model.target import Target

PROMPTS = [*random_prompts(3), list(range(5, 75))]  # the last: a product for many rows
LENGTH = 40


def quantized(kind: str, dtype: torch.dtype) -> Target:
    target = wide_target(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)  # every matrix has a shape for it
        quantize(target, kind)
    return target


def greedy(llm: LLM, length: int = LENGTH) -> list[list[int]]:
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    return [answer.token_ids for answer in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_accepted_drafts_change_nothing(kind: str, batch: int, oracle: Oracle) -> None:
    target = quantized(kind, torch.float32)
    drafter = make_drafter(target, "p-eagle")
    said = greedy(LLM(target, lookup=False), LENGTH + 8)
    oracle.futures = [p + a for p, a in zip(PROMPTS, said, strict=True)]
    oracle.error_rate = 0.3
    llm = LLM(target, drafter, k=4, max_batch=batch)
    assert greedy(llm) == [answer[:LENGTH] for answer in said]
    assert sum(map(sum, oracle.hits.values())) > 20, "drafts were accepted"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_guess_change_nothing_bit_for_bit(kind: str, method: str) -> None:
    target = quantized(kind, torch.bfloat16)
    drafter = make_drafter(target, method).bfloat16()
    plain = greedy(LLM(target, max_batch=1, deterministic=True, lookup=False))
    llm = LLM(target, drafter, k=7, max_batch=1, deterministic=True)
    assert greedy(llm) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_one_by_one_and_together(kind: str) -> None:
    """The deterministic mode over quantised weights."""
    target = quantized(kind, torch.bfloat16)
    ids = torch.randint(5, 512, (510 + ROW_TILE,), generator=torch.Generator().manual_seed(1))
    singly = logits_behind(target, ids, [1] * ROW_TILE)
    for blocks in ([ROW_TILE], [1, ROW_TILE - 1]):
        assert torch.equal(singly, logits_behind(target, ids, blocks)), blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [64, 80])
def test_by_name(tmp_path: Path, kind: str, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose inputs are no multiple of 32 keep their weights with int4, and are named:
    by transformers' model, whose weights are then the only ones that are read."""
    if kind == "int4" and inner == 80:
        monkeypatch.setattr("peagle.model.loader.read_weights", None)
    config = LlamaConfig(
        **PLAIN | {"vocab_size": 128, "hidden_size": 64, "intermediate_size": inner}
    )
    target = Target(build(config), make_tokenizer(), "tiny")
    folder = str(save_target(target, tmp_path / "target"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", InputWarning)
        llm = LLM(folder, lookup=False, quantize=kind)
    kept = [str(one.message) for one in warned if isinstance(one.message, InputWarning)]
    assert len(kept) == (kind == "int4" and inner == 80)
    assert all("mlp.down_proj" in line for line in kept)
    assert [len(ids) for ids in greedy(llm)] == [LENGTH] * len(PROMPTS)
