"""Acceptance measured in training is what the engine measures, on prompts never trained on."""

import pytest
import torch
from tiny import METHODS, make_drafter, make_target, own_answers

from peagle.data.example import Example
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.train.evaluate import MAX_TOKENS, acceptance, hold_out, prompt_of


@pytest.mark.parametrize("method", METHODS)
def test_equals_the_engine_and_leaves_the_drafter_alone(method: str) -> None:
    target = make_target()
    drafter = make_drafter(target, method).train()
    before = {name: t.clone() for name, t in drafter.state_dict().items()}
    prompts = [prompt_of(e) for e in own_answers(target, 6)]
    found = acceptance(target, [*prompts, [7] * 250], drafter)
    assert drafter.training and drafter.norm.weight.dtype == torch.float32
    assert all(torch.equal(t, before[name]) for name, t in drafter.state_dict().items())
    total = Stats()
    llm = LLM(target, drafter.eval(), k=7)
    for answer in llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS)):
        total += answer.stats
    assert (found.rounds, found.accepted) == (total.rounds, total.accepted)
    assert found.rounds > 100


def test_held_out_prompts_are_not_trained_on() -> None:
    data = [Example([i, 1, 2], [False, True, True]) for i in [*range(40), 5]]
    train, prompts = hold_out(data, 4)
    assert (len(train), prompts) == (37, [[37], [38], [39]]), "5 is among those trained on"
    assert hold_out(data[:9], 4) == (data[:9], []), "too few to spare any"
    assert len(hold_out(data, 100).train) == 37, "at most a tenth"
