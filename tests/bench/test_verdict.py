"""Whether a head is worth it: the sentence from made-up numbers, the timing's structure."""

from typing import Any

import pytest
from tiny import make_drafter, make_target

from peagle.bench import native as module
from peagle.bench.native import MAX_TOKENS, PROMPTS, sentence, time_head, verdict
from peagle.bench.summary import Cell, Result
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.model.drafter import Drafter


def chain(k: int) -> Drafting:
    return Drafting("p-eagle", k)


def timed(
    drafting: Drafting, length: float, speed_up: float, edges: list[float] | None = None
) -> dict[str, Any]:
    found = {"acceptance_length": length, "speed_up": speed_up, "speed_up_95": edges}
    return Cell(drafting, 1, 0.0).row | {"tokens_per_forward": length} | found


MEASURED = chain(2).row | {"acceptance_length": 1.5}


@pytest.mark.parametrize(
    ("timing", "said"),
    [
        (
            timed(chain(3), 1.68, 1.32, [1.2, 1.41]),
            "worth it: 1.32 × (1.20–1.41) the target alone at K = 3 (acceptance length 1.68)",
        ),
        (
            timed(chain(7), 1.05, 0.93, [0.9, 0.97]),
            "not worth it: 0.93 × (0.90–0.97) the target alone at K = 7; acceptance length 1.05: "
            "train it on answers of this target (peagle train --init-from)",
        ),
        (
            timed(chain(3), 1.03, 1.07, [1.01, 1.1]),  # faster than drafts can make it
            "not worth it: 1.07 × (1.01–1.10) the target alone at K = 3; acceptance length 1.03: "
            "train it on answers of this target (peagle train --init-from)",
        ),
        (
            timed(chain(2), 2.1, 1.01, [1.005, 1.02]),
            "not worth it: 1.01 × (1.00–1.02) the target alone at K = 2; acceptance length 2.10: "
            "drafting costs more here than it saves: try another K or a smaller head",
        ),
        (
            timed(chain(3), 1.4, 1.17, [0.95, 1.4]),
            "too few prompts to tell whether it is worth it: 1.17 × (0.95–1.40) the target alone "
            "at K = 3 (acceptance length 1.40); peagle bench measures more",
        ),
        (
            timed(chain(3), 1.4, 1.3),  # of one prompt
            "too few prompts to tell whether it is worth it: 1.30 × the target alone at K = 3 "
            "(acceptance length 1.40); peagle bench measures more",
        ),
        (
            timed(chain(3), 1.51, 3.83, [3.5, 4.0]),
            "not judged: p-eagle K = 3, c = 1: 3.83 × is impossible with 1.51 tokens a target "
            "forward: the machine was busy; run it again, alone",
        ),
    ],
)
def test_sentence(timing: dict[str, Any], said: str) -> None:
    assert sentence(timing) == said


def test_a_tree_is_named() -> None:
    timing = timed(Drafting("p-eagle", None, 12, lookup=True), 2.5, 2.0, [1.8, 2.2])
    assert sentence(timing).startswith("worth it: 2.00 × (1.80–2.20) the target alone at 12 nodes")
    assert "12 nodes + lookup" in sentence(timing)


def test_the_fastest_k_decides() -> None:
    edges = [1.4, 1.6]
    said = verdict([timed(chain(3), 1.6, 1.5, edges), timed(chain(7), 1.7, 1.2)])
    assert (said["k"], said["speed_up"], said["worth_it"]) == (3, 1.5, True)
    assert said["speed_up_95"] == edges
    assert said["sentence"].startswith("worth it: 1.50 ×")
    assert [timing["k"] for timing in said["timings"]] == [3, 7]
    assert verdict([timed(chain(3), 1.1, 0.5, [0.4, 0.6])])["worth_it"] is False
    assert verdict([timed(chain(3), 1.6, 1.5)])["worth_it"] is False, "of one prompt"


def test_one_impossible_speed_up_refuses_the_verdict() -> None:
    busy = timed(chain(3), 1.2, 1.4, [1.3, 1.5])
    said = verdict([timed(chain(7), 2.0, 1.8, [1.7, 1.9]), busy])
    assert said["sentence"].startswith("not judged: ") and said["worth_it"] is False


@pytest.fixture
def llm() -> LLM:
    target = make_target()
    return LLM(target, make_drafter(target, "p-eagle"))


def test_timing_is_interleaved_and_short(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[Drafting], list[str], SamplingParams]] = []
    real = module.side_by_side

    def side_by_side(
        llm: LLM,
        drafters: dict[Drafting, Drafter | None],
        prompts: list[str],
        params: SamplingParams,
    ) -> list[Result]:
        seen.append((list(drafters), prompts, params))
        return real(llm, drafters, prompts, SamplingParams(max_tokens=4))

    monkeypatch.setattr(module, "side_by_side", side_by_side)
    tree = Drafting("p-eagle", None, 8).row | {"acceptance_length": 1.6}
    measured = [MEASURED, tree]
    timings = time_head(llm, measured, [["the cat", "more"]] * 9, SamplingParams(max_tokens=512))
    [(drafting, prompts, params)] = seen
    assert drafting == [chain(2), Drafting("p-eagle", None, 8)]
    assert (prompts, params.max_tokens) == (["the cat"] * PROMPTS, MAX_TOKENS)
    assert [(Drafting.from_row(t), t["acceptance_length"]) for t in timings] == [
        (chain(2), 1.5),
        (Drafting("p-eagle", None, 8), 1.6),
    ]
    for timing in timings:
        assert timing["output_tps"] > 0 and len(timing["speed_up_95"]) == 2
    [alone] = time_head(llm, [MEASURED], [["the cat"]], SamplingParams(max_tokens=4))
    assert alone["speed_up_95"] is None


def test_a_prompt_that_does_not_fit_is_not_timed(llm: LLM) -> None:
    conversations = [["the cat"], ["the cat " * 300], ["mat"]]
    [timing] = time_head(llm, [MEASURED], conversations, SamplingParams(max_tokens=4))
    assert timing["requests"] == 2 and timing["speed_up"] > 0


def test_nothing_is_timed_when_no_prompt_fits(llm: LLM) -> None:
    assert time_head(llm, [MEASURED], [["the cat " * 300]], SamplingParams()) == []
