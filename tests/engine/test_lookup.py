"""Lookup finds what followed before, and joins the head's candidates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_target

from peagle.engine.llm import LLM
from peagle.engine.lookup import SIZES, Index, LookupCalibration, with_lookup
from peagle.engine.params import SamplingParams
from peagle.engine.tree import Candidate, Match, along, grow


def found_by_hand(tokens: list[int], most: int) -> Match:
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return Match(size, tuple(tokens[end : end + most]))
    return Match()


@given(st.lists(st.integers(0, 2), max_size=40), st.data())
def test_the_last_occurrence_of_the_longest_end(tokens: list[int], data: st.DataObject) -> None:
    """However the text has grown."""
    index, end = Index(), 0
    while end < len(tokens):
        end += data.draw(st.integers(1, 5))
        most = data.draw(st.integers(0, 6))
        assert index.find(tokens[:end], most) == found_by_hand(tokens[:end], most)


def test_a_common_prefix_is_one_node() -> None:
    """By hand: both know 5, only lookup knows 6 and 9; its chance is one half."""
    head = {(): [Candidate(5, 0.8, 0.4), Candidate(7, 0.2, 0.3)], (5,): [Candidate(8, 0.9, 0.9)]}
    offer = with_lookup(lambda path: head.get(path, []), Match(3, (5, 6, 9)), LookupCalibration())
    assert offer(()) == [Candidate(5, 0.8, 0.5), Candidate(7, 0.2, 0.3)]
    assert offer((5,)) == [Candidate(6, 0.0, 0.5), Candidate(8, 0.9, 0.5)], "at most 1 together"
    assert offer((5, 6)) == [Candidate(9, 0.0, 0.5)]
    assert offer((7,)) == offer((5, 6, 9)) == []
    draft = grow(offer, 4, Match(3, (5, 6, 9)))
    followed = draft.follow(draft.match.tokens)
    assert [draft.tokens[row - 1] for row in followed] == [5, 6, 9][: draft.depth]


def test_its_chances_are_learnt_by_size_and_depth() -> None:
    lookups, match = LookupCalibration(), Match(4, (5, 6, 7))
    assert lookups.along(match) == [0.5, 0.25, 0.125]
    draft = grow(with_lookup(along([]), match, lookups), 3, match)
    for _ in range(300):
        lookups.count(draft, [1])  # the first is accepted, so the third was never tried
    assert lookups.along(match) == pytest.approx([1.0, 0.0, 0.0], abs=0.01)
    assert lookups(4, 2) == lookups(3, 0) == 0.5


def test_the_index_of_a_request_ends_with_it() -> None:
    """A run keeps its requests for their answers."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    run = LLM(make_target(), nodes=8).stream([[5, 6, 7, 8] * 9] * 2, params)
    run.step()
    assert all(request.seen._next for request in run.requests)
    run.engine.cancel(run.requests[1])
    list(run)
    assert [request.finish_reason for request in run.requests] == ["length", "abort"]
    assert not any(request.seen._next for request in run.requests)


def test_nothing_is_drafted_for_half_a_prompt() -> None:
    """The third prompt does not fit into the first round: a draft would be cut with its rest."""
    llm = LLM(make_target(), lookup=True, max_batch=3)
    llm.engine.scheduler.budget = 512
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    prompts = [[10 + number, *[5, 6, 7, 8] * 50] for number in range(3)]
    requests = [llm.make_requests(ids, params)[0] for ids in prompts]
    llm.engine.add(*requests)
    llm.engine.step()
    assert 0 < requests[2].num_computed_tokens < len(prompts[2]) - 1
    assert not requests[2].draft
