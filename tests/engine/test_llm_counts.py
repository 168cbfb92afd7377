"""Counts of a request while it decodes: by depth, by source, by target forward."""

from collections import Counter

import pytest
from answers import alone
from tiny import random_prompts

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Chunk, Stats
from peagle.engine.scheduler import ScheduledRequest, Scheduler
from peagle.model.drafter import Drafter
from peagle.model.target import Target

PROMPT = random_prompts(1)[0]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)  # a chunk a token


def run(llm: LLM, prompt: list[int]) -> tuple[Stats, list[Chunk], int]:
    """Counts and chunks of one answer, and the number of rounds after the prompt's."""
    answering = llm.stream([prompt], PARAMS)
    chunks = answering.step()
    assert len(chunks) == 1, "the prompt's forward gives one token"
    rounds = 0
    while answering.requests[0].finish_reason is None:
        chunks += answering.step()
        rounds += 1
    return answering.completions()[0].stats, chunks, rounds


@pytest.mark.parametrize(
    "kind", ["none", "chain", "tree", "tree + lookup", "chain + lookup", "lookup"]
)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["some", "one token"])
def test_decoding_is_counted(
    target: Target, drafters: dict[str, Drafter], kind: str, prompt: list[int]
) -> None:
    head = drafters["p-eagle"]
    llm = {
        "none": LLM(target, lookup=False),
        "chain": LLM(target, head, k=3),
        "tree": LLM(target, head, nodes=8, lookup=False),
        "tree + lookup": LLM(target, head, nodes=8),
        "chain + lookup": LLM(target, drafters["eagle3"], nodes=8, lookup=True),
        "lookup": LLM(target, nodes=8, lookup=True),
    }[kind]
    # The prompt has the beginning of the answer: lookup knows it.
    [answer] = alone(target, [prompt], PARAMS)
    said = prompt if len(prompt) == 1 else [*prompt, *answer.token_ids[:20], *prompt]
    stats, chunks, rounds = run(llm, said)
    assert (stats.forwards, stats.tokens) == (rounds, PARAMS.max_tokens - 1)
    assert stats.tokens_per_forward == (PARAMS.max_tokens - 1) / rounds
    assert stats.rows_per_round == 1 + stats.drafted / rounds
    assert [chunk.depth > 0 for chunk in chunks] == [chunk.source != "target" for chunk in chunks]
    sources = [chunk.source for chunk in chunks]
    cut = sum(stats.accepted) - (len(sources) - sources.count("target"))
    assert 0 <= cut <= 8, "behind the answer's end"
    assert 0 <= stats.accepted_from_lookup - sources.count("lookup") <= cut
    if kind in {"none", "chain", "tree"}:
        assert stats.accepted_from_lookup == 0
    if kind == "lookup":
        assert stats.accepted_from_lookup == sum(stats.accepted) > 0
        assert stats.rounds < stats.forwards, "nothing was drafted in some rounds"
    if kind == "chain + lookup" and said is not prompt:
        assert {"target", "head", "lookup"} == set(sources)
    if kind in {"chain", "tree"}:
        assert stats.nodes_per_round > 2


def test_an_answer_after_a_preemption(
    target: Target, p_eagle: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running a prompt again does not count as decoding, nor does what was answered already."""
    llm = LLM(target, p_eagle, nodes=8, kv_tokens=160, max_batch=4)
    schedule, decoded, again = Scheduler.schedule, Counter[int](), 0

    def noted(scheduler: Scheduler) -> list[ScheduledRequest]:
        nonlocal again
        scheduled = schedule(scheduler)
        for request, tokens, draft in scheduled:
            if request.output:
                decoded[request.index] += tokens == 1 + len(draft)
                again += request.num_computed_tokens >= 3 and tokens > 1 + len(draft)
        return scheduled

    monkeypatch.setattr(Scheduler, "schedule", noted)
    answering = llm.stream([[60 + i, 61, 62] for i in range(4)], PARAMS)
    list(answering)
    assert sum(request.preempted for request in answering.requests) > 0
    assert again > 0, "a part of an answer is run again, and nothing of its prompt"
    for request in answering.requests:
        stats = request.stats
        assert stats.forwards == decoded[request.index]
        assert 0 < stats.forwards <= stats.tokens < len(request.output)
        assert stats.rounds <= stats.forwards
