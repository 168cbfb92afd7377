"""`benchmarks/lossless.py`: a difference is a tie only where two tokens are as good as equal."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from tiny import make_target, random_prompts, save_target

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.target import Target

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
POSITION = 3


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("lossless").differences


@pytest.fixture
def target() -> Target:
    return make_target()


def decoded(target: Target) -> tuple[list[list[int]], list[list[int]]]:
    prompts = random_prompts(2)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return prompts, [c.token_ids for c in LLM(target, lookup=False).generate(prompts, params)]


def test_a_target_that_native_code_runs_is_judged_by_its_model(
    benchmark_script, target: Target, tmp_path: Path
) -> None:
    llm = LLM(str(save_target(target, tmp_path / "target")), dtype="float32", lookup=False)
    assert not llm.target.runs
    prompts, outputs = decoded(target)
    outputs[0][POSITION] ^= 1
    params = [SamplingParams(max_tokens=8, ignore_eos=True)] * len(prompts)
    row = benchmark_script("lossless").compare(llm, prompts, outputs, params)
    assert [found["position"] for found in row["differences"]] == [POSITION]


def test_equal_outputs_have_no_differences(differences, target):
    prompts, outputs = decoded(target)
    assert differences(target, prompts, outputs, outputs) == []


def test_another_token_is_a_difference_at_its_position(differences, target):
    prompts, outputs = decoded(target)
    wrong = outputs[1][POSITION] ^ 1
    found = [outputs[0], [*outputs[1][:POSITION], wrong, *outputs[1][POSITION + 1 :]]]
    (difference,) = differences(target, prompts, outputs, found)
    assert difference[:3] == (1, POSITION, (outputs[1][POSITION], wrong))
    assert not difference.tie


def test_an_early_end_is_no_tie(differences, target):
    prompts, outputs = decoded(target)
    (difference,) = differences(target, prompts, outputs, [outputs[0], outputs[1][:-1]])
    assert difference.tokens == (outputs[1][-1], None)
    assert not difference.tie


def test_twin_tokens_are_a_tie_and_a_third_is_not(differences, target):
    prompts, outputs = decoded(target)
    said = outputs[0][0]
    twin, third = [token for token in (5, 6, 7) if token != said][:2]
    table = target.model.get_output_embeddings().weight
    table.copy_(torch.where(torch.arange(len(table))[:, None] == twin, table[said], table))
    (tie,) = differences(target, prompts[:1], [[said]], [[twin]])
    assert tie.tie
    assert tie.gap < 1e-6
    (other,) = differences(target, prompts[:1], [[said]], [[third]])
    assert not other.tie
