"""Acceptance over a set of conversations equals the sum of the requests' own statistics."""

import pytest
from refusals import refused
from tiny import make_drafter, make_target

from peagle.bench.native import measure_acceptance
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.request import Stats

CONVERSATIONS = [["the cat", "the hat"], ["what a day"], ["mat", "sat", "ran"]]
GREEDY = SamplingParams(max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = make_target()
    return LLM(target, make_drafter(target, "p-eagle"), k=3, max_batch=2)


def one_by_one(llm: LLM) -> tuple[Stats, int]:
    """Every turn as a request of its own, after the target's earlier answers."""
    total, tokens = Stats(), 0
    for turns in CONVERSATIONS:
        history: list[dict[str, str]] = []
        for turn in turns:
            history.append({"role": "user", "content": turn})
            answer = llm.generate([prompt_ids(llm.tokenizer, history)], GREEDY)[0]
            history.append({"role": "assistant", "content": answer.text})
            total += answer.stats
            tokens += len(answer.token_ids)
    return total, tokens


def test_equals_the_turns_one_by_one(llm: LLM) -> None:
    found, (stats, tokens) = measure_acceptance(llm, CONVERSATIONS, GREEDY), one_by_one(llm)
    assert stats.rounds > 20
    assert found == {
        "method": "p-eagle",
        "k": 3,
        "max_nodes": None,
        "lookup": False,
        "concurrency": 2,
        "temperature": 0.0,
        "acceptance_length": round(stats.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in stats.accepted_per_position],
        "nodes": round(stats.drafted / stats.rounds, 2),
        "rows_per_round": round(1 + stats.drafted / stats.forwards, 2),
        "tokens_per_forward": round(stats.tokens / stats.forwards, 4),
        "accepted_from_lookup": 0,
        "rounds": stats.rounds,
        "output_tokens": tokens,
        "skipped_turns": 0,
        "error": None,
    }


def test_progress_counts_every_turn(llm: LLM) -> None:
    done: list[int] = []
    measure_acceptance(llm, CONVERSATIONS, GREEDY, done.append)
    assert sum(done) == 6
    assert min(done) >= 0


def test_turns_beyond_the_context_are_left_out(llm: LLM) -> None:
    too_long = "the cat sat on the mat " * 60
    alone = measure_acceptance(llm, [["mat"]], GREEDY)
    with_long = measure_acceptance(llm, [["mat", too_long, "hat"], [too_long]], GREEDY)
    assert "takes 256 tokens of context" in with_long["error"]
    about = {"concurrency": 2, "skipped_turns": 3, "error": with_long["error"]}
    assert alone["concurrency"] == 1, "as many as there are conversations"
    assert with_long == alone | about
    with pytest.raises(RequestFailure, match="takes 256 tokens of context"):
        measure_acceptance(llm, [[too_long], [too_long, "mat"]], GREEDY)


def test_a_target_without_a_template_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with refused():
        measure_acceptance(llm, CONVERSATIONS, GREEDY)
