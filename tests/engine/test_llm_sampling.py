"""The whole engine, sampled, on a target of a few tokens: its output has the target's law."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from chisquare import naive_logits, naive_probabilities, p_value
from tiny import make_drafter, make_target

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.run import Completion
from peagle.engine.tree import Draft
from peagle.model.attention import CausalAttend
from peagle.model.target import Target

VOCAB, PROMPT, DRAWS = 7, [3], 4000


@pytest.fixture(scope="module")
def small() -> Target:
    return make_target(VOCAB, seed=7, layers=1, spread=0.2)


def next_law(target: Target, ids: list[int], params: SamplingParams) -> np.ndarray:
    tokens = torch.tensor(ids)
    hidden = target.forward(tokens, torch.arange(len(ids)), CausalAttend()).hidden
    row = target.logits(hidden[-1:])[0].double().numpy()
    return naive_probabilities(naive_logits(row, params, PROMPT, ids[len(PROMPT) :]), params)


def exact_joint(target: Target, params: SamplingParams) -> np.ndarray:
    """Law of the second and third token, summed over the first, by enumeration."""
    joint, first = np.zeros((VOCAB, VOCAB)), next_law(target, PROMPT, params)
    for a in first.nonzero()[0]:
        second = next_law(target, [*PROMPT, a], params)
        for b in second.nonzero()[0]:
            third = next_law(target, [*PROMPT, a, b], params)
            joint[b] += first[a] * second[b] * third
    return joint


def sample(
    target: Target, method: str, params: SamplingParams, nodes: int | None = None
) -> list[Completion]:
    """The second and third tokens are both judged drafts: chains of K = 2, or trees."""
    drafter = make_drafter(target, method, seed=3, layers=1, draft_vocab=VOCAB)
    llm = LLM(target, drafter, k=None if nodes else 2, nodes=nodes, max_batch=500)
    params = replace(params, max_tokens=3, ignore_eos=True)
    return llm.generate([PROMPT] * DRAWS, [replace(params, seed=i) for i in range(DRAWS)])


def count(done: list[Completion]) -> Counter[tuple[int, int]]:
    return Counter((c.token_ids[1], c.token_ids[2]) for c in done)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3}


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("p-eagle", SamplingParams(temperature=0.7, top_p=0.9)),
        ("eagle3", SamplingParams(temperature=1.3, top_p=0.9)),
        ("p-eagle", SamplingParams(temperature=1, **PENALTIES)),
        ("eagle3", SamplingParams(temperature=0.8, logit_bias={1: 1, 5: -1}, **PENALTIES)),
    ],
)
def test_joint_law(small: Target, method: str, params: SamplingParams) -> None:
    done = sample(small, method, params)
    counts = count(done)
    assert p_value(counts, exact_joint(small, params)) > 0.001
    assert len(counts) > 8, "a law worth testing"
    accepted = sum(c.drafted[1] for c in done)
    assert 0.1 * DRAWS < accepted < 0.9 * DRAWS, "drafts are accepted, and rejected"


TREES = [SamplingParams(temperature=1.3, top_p=0.9), SamplingParams(temperature=1, **PENALTIES)]


@pytest.mark.parametrize("params", TREES)
def test_joint_law_of_branching_trees(small: Target, params: SamplingParams) -> None:
    done = sample(small, "p-eagle", params, nodes=7)
    assert p_value(count(done), exact_joint(small, params)) > 0.001
    accepted = sum(c.drafted[1] for c in done)
    assert 0.1 * DRAWS < accepted < 0.98 * DRAWS, "drafts are accepted, and rejected"


def test_a_wrong_walk_is_noticed(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the first child of a row, whatever was chosen there."""

    def first_children(draft: Draft, _: list[int]) -> list[int]:
        path = list[int]()
        while (last := (path or [0])[-1]) in draft.parents:
            path.append(draft.parents.index(last) + 1)
        return path

    monkeypatch.setattr(Draft, "path", first_children)
    counts = count(sample(small, "p-eagle", TREES[0], nodes=7))
    assert p_value(counts, exact_joint(small, TREES[0])) < 1e-6
