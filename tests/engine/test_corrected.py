"""Drafts of a head with a correction: each token is chosen given the one before."""

from dataclasses import replace

import pytest
import torch
from answers import alone, token_ids
from corrected_heads import corrected
from refusals import refused
from tiny import make_drafter, random_prompts
from tree_reference import accepted_as_the_reference, place_states

from peagle.engine.corrected import CorrectedScores, Drafted, correction_table
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.methods.registry import METHODS
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PROMPTS = random_prompts(5)
K = 4


@pytest.fixture(scope="module")
def head(drafters: dict[str, Drafter]) -> Drafter:
    """It does not know some of the tokens."""
    return corrected(drafters["p-eagle"], spread=0.6)


def drafted(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    """A request after its first round."""
    [request] = llm.make_requests(prompt, params)
    llm.engine.add(request)
    llm.engine.step()
    return request


@torch.no_grad()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_chain_is_the_oracles(target: Target, head: Drafter, prompt: list[int]) -> None:
    """Token for token: the likeliest candidate of each place, by the whole corrected logits."""
    llm = LLM(target, head, k=K)
    request = drafted(llm, prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    states = place_states(head, target, request.tokens, K)
    before, chain = request.tokens[-1], list[int]()
    for state in states.split(1):
        parallel = METHODS["p-eagle"].logits(head, state, None)[0]
        given = METHODS["p-eagle"].logits(head, state, torch.tensor([before]))[0]
        assert head.correction is not None
        offered = parallel.topk(head.correction.candidates).indices
        before = int(head.target_ids[offered[given[offered].argmax()]])
        chain.append(before)
    assert request.draft.tokens == chain


def test_it_changes_what_is_drafted(target: Target, head: Drafter) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = replace(head.config, correction=None)
    without = METHODS["p-eagle"].build(plain)
    without.load_state_dict(head.state_dict(), strict=False)
    without.share_embedding(target.embedding)
    rows = [
        [a.stats.accepted for a in LLM(target, each, k=K).generate(PROMPTS, params)]
        for each in (head, without.eval())
    ]
    assert rows[0] != rows[1]


@pytest.mark.parametrize("nodes", [3, 8, 20])
def test_a_tree_is_the_references(target: Target, head: Drafter, nodes: int) -> None:
    assert accepted_as_the_reference(target, head, PROMPTS[:3], nodes, K) > 0


LENGTHS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 1, 33, 7, 26)]
KINDS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "a grammar": {"regex": "(the |cat |a|b|c){2,60}", "ignore_eos": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [{"k": K}, {"nodes": 12}, {"nodes": 40}, {}])
def test_tokens_as_alone(target: Target, head: Drafter, kind: str, drafts: dict[str, int]) -> None:
    """In batches, with what lookup offers beside the head's candidates."""
    params = [replace(own, **KINDS[kind]) for own in LENGTHS]
    found = LLM(target, head, max_batch=3, **drafts).generate(PROMPTS, params)
    assert token_ids(found) == token_ids(alone(target, PROMPTS, params, max_batch=2))


@torch.no_grad()
def test_a_place_after_any_token(target: Target, head: Drafter) -> None:
    """Offers of two requests: after the tokens that the head offers before them, which are scored
    together, and after all others."""
    states = [place_states(head, target, prompt, 3)[:3] for prompt in ([7, 8], [9, 60])]
    table = correction_table(head)
    assert table is not None
    drafted = Drafted(torch.cat(states), [range(3), range(3, 6)], [8, 60])
    scores = CorrectedScores(head, table, drafted, 16, lambda _, prob: prob)
    assert head.correction is not None
    for row, state in enumerate(torch.cat(states).split(1)):
        parallel = METHODS["p-eagle"].logits(head, state, None)[0]
        offered = parallel.topk(head.correction.candidates).indices
        for token in (2, 6, 8, 60, *range(20, 128, 4)):
            given = METHODS["p-eagle"].logits(head, state, torch.tensor([token]))[0].softmax(-1)
            best = given[offered].topk(16)
            found = list(scores.after(row, token))
            assert [one.token for one in found] == head.target_ids[offered[best.indices]].tolist()
            probs = torch.tensor([one.prob for one in found])
            torch.testing.assert_close(probs, best.values)
    together = sum(token in known for known in scores.before for token in range(20, 128, 4))
    assert 20 < together < 6 * 27, "both ways were taken"


def test_a_correction_is_of_parallel_heads(target: Target) -> None:
    with refused("correction"):
        corrected(make_drafter(target, "eagle3"))
