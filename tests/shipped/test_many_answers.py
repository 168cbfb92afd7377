"""heads/generate.py answers as the engine does, whatever is answered beside."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_target

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.target import Target

PROMPTS = [[5, 6, 7], [9], list(range(20, 60)), [11, 12], [30, 31, 32, 33, 34]]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "heads")
    return import_module("generate")


@pytest.mark.parametrize("at_once", [1, 3, 1 << 16])  # prompt tokens
def test_greedy_answers_are_the_engines(
    generate: Any, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Rows that have ended are left out on the way: each target ends answers at other steps."""
    monkeypatch.setattr(generate, "PREFILL", at_once)
    lengths = set[int]()
    for seed in range(3):
        target = make_target(seed=seed)
        target.end_ids = list(range(0, target.embedding.shape[0], 6))
        wanted = [
            completion.token_ids
            for completion in LLM(target).generate(PROMPTS, SamplingParams(max_tokens=70))
        ]
        assert generate.Generator(target).answer(PROMPTS, 70, 0.0) == wanted
        lengths |= {len(ids) for ids in wanted}
    assert len(lengths) > 3, "answers end at different steps"


def test_sampled_tokens_have_their_probability(generate: Any, target: Target) -> None:
    torch.manual_seed(0)
    generator = generate.Generator(target)
    hidden, rows = torch.randn(generator.embedding.shape[1]), 40_000
    logits = (hidden @ generator.head.T).float() / 0.7
    wanted = logits.softmax(-1)
    wanted[wanted < generate.MIN_P * wanted.max()] = 0
    wanted /= wanted.sum()
    drawn = generator._choose(hidden.expand(rows, -1), 0.7).bincount(minlength=len(wanted)) / rows
    assert ((drawn - wanted).abs() <= 5 * (wanted * (1 - wanted) / rows).sqrt()).all()


def test_a_loop_is_cut(generate: Any) -> None:
    start, loop = list(range(100, 150)), [7, 8, 9]
    cut = generate.without_loop(start + loop * 60)
    assert cut == (start + loop * 60)[: len(cut)]
    assert len(start) < len(cut) <= len(start) + len(loop) + generate.KEPT
    assert generate.without_loop(start + loop * 20) == start + loop * 20, "too short a loop"
    assert generate.without_loop(start) == start


def test_prompts_of_like_lengths_are_answered_together(generate: Any) -> None:
    prompts = [[1] * (number % 700 + 1) for number in range(5000)]
    parts = list(generate.groups(prompts, 384))
    assert sorted(number for part in parts for number in part) == list(range(5000))
    for part in parts:
        longest = max(len(prompts[number]) for number in part)
        assert len(part) <= generate.ROWS and len(part) * (longest + 384) <= generate.KEYS
