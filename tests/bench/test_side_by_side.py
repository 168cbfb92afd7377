"""The three-way comparison: same prompts, interleaved, order rotating, one result each."""

from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import ref

import pytest
from tiny import METHODS, make_drafter, make_target

from peagle.bench import native, summary
from peagle.bench.native import WARM_UP, Conversations, Player, side_by_side
from peagle.bench.summary import Cell, Played, Result, Sample
from peagle.data.chat import prompt_ids
from peagle.engine.drafting import Drafting
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.model.drafter import Drafter

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = ["the cat", "what a day", "the hat sat", "mat"]


@pytest.fixture
def llm() -> LLM:
    return LLM(make_target(), max_batch=1)


def chains(llm: LLM) -> dict[Drafting, Drafter | None]:
    return {Drafting(m, 2): make_drafter(llm.target, m) for m in METHODS}


def test_results_count_all_prompts_and_agree(llm: LLM) -> None:
    seen: list[int] = []
    results = side_by_side(llm, chains(llm), PROMPTS, PARAMS, lambda: seen.append(1))
    assert len(seen) == 12
    asked = [prompt_ids(llm.tokenizer, [{"role": "user", "content": p}]) for p in PROMPTS]
    plain = LLM(llm.target, lookup=False).generate(asked, PARAMS)
    for result in results:
        assert [sample.conversation for sample in result.samples] == [0, 1, 2, 3]
        assert [list(sample.output) for sample in result.samples] == [a.token_ids for a in plain]
        assert summary.same(result, results[0])["same"] == 4
        row = summary.row(result, results[0])
        assert row["output_tokens"] == 48  # the warm-up is not counted
        assert row.get("same", 4) == 4 and row["speed_up"] > 0
    cells = [(r.cell.drafting.method, r.cell.drafting.k) for r in results]
    assert cells == [("none", 0), ("p-eagle", 2), ("eagle3", 2)]
    alone = LLM(llm.target, make_drafter(llm.target, "p-eagle"), k=2).generate(asked, PARAMS)
    [played] = results[1].repeats
    assert played.drafting.rounds == sum(answer.stats.rounds for answer in alone)
    assert sum(played.drafting.accepted) == sum(chain.from_iterable(a.drafted for a in alone))


def test_speed_up_interval_and_bound_are_of_all_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short answers that are drafted well do not stand for the long ones."""
    answers = [(20, 4.0), (20, 4.0), (64, 1.1), (64, 1.1)]  # tokens, times as fast

    def play(results: list[Result], *_: Any) -> None:
        for result in results:
            for number, (tokens, times) in enumerate(answers):
                seconds = tokens / times if result.cell.drafting.k else float(tokens)
                sample = Sample(number, 0, seconds, 0.0, tokens, (number,))
                stats = Stats(forwards=round(seconds), tokens=tokens)
                result.repeats.append(Played([sample], seconds, stats))

    monkeypatch.setattr(native, "play", play)
    alone, head, _ = side_by_side(llm, chains(llm), PROMPTS, PARAMS)
    row = summary.row(head, alone)
    seconds = sum(tokens / times for tokens, times in answers)
    assert row["speed_up"] == round(168 / seconds, 3) and row["repeats"] == 1
    assert summary.doubt(row) is None
    low, high = row["speed_up_95"]
    assert low <= row["speed_up"] <= high


def test_each_engine_is_warmed_up_at_its_load(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[int, int]] = []
    real = Player.play

    def play(player: Player, conversations: Conversations, *more: Any, **named: Any) -> Played:
        played.append((id(player.llm), len(conversations)))
        return real(player, conversations, *more, **named)

    monkeypatch.setattr(Player, "play", play)
    engines = [llm.use(None, lookup=False) for _ in range(2)]
    opened = iter(engines)
    results = [Result(Cell(Drafting(), 3, 0.0))]
    parts = [(0, [[prompt] for prompt in PROMPTS])] * 2
    native.play(results, parts, lambda cell, seed: Player(next(opened), PARAMS))
    assert played == [(id(each), count) for each in engines for count in (3, len(PROMPTS))]
    assert sum(sample.tokens for sample in results[0].samples) == 2 * 48


def test_an_answer_has_the_same_seed_in_all_cells(llm: LLM) -> None:
    """Whatever the load; and another one in each part."""
    results = [Result(Cell(Drafting(), load, 1.0)) for load in (1, 3)]
    parts = [(0, [["the cat", "then"], ["what a day"], ["mat"]])] * 2

    def opened(cell: Cell, seed: int) -> Player:
        return Player(llm, replace(PARAMS, temperature=1.0, seed=seed))

    native.play(results, parts, opened)
    said = [
        [{sample.key: sample.output for sample in played.samples} for played in result.repeats]
        for result in results
    ]
    assert said[0] == said[1]
    first, second = said[0]
    assert len({*first.values(), *second.values()}) == 8


def test_the_next_engine_has_the_memory_of_the_last(llm: LLM) -> None:
    made = list[ref[LLM]]()

    def opened(cell: Cell, seed: int) -> Player:
        assert not any(each() for each in made)
        used = llm.use(None, lookup=False)
        made.append(ref(used))
        return Player(used, PARAMS)

    native.play([Result(Cell(Drafting(), 1, 0.0))], [(0, [["the cat"]])] * 3, opened)
    assert len(made) == 3


def test_order_rotates(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = Player.play

    def play(player: Player, conversations: Conversations, *more: Any, **named: Any) -> Played:
        if conversations != WARM_UP:
            order.append(player.llm.drafting.method)
        return real(player, conversations, *more, **named)

    monkeypatch.setattr(Player, "play", play)
    side_by_side(llm, chains(llm), PROMPTS, PARAMS)
    names = ["none", "p-eagle", "eagle3"]
    assert order == [names[(turn + i) % 3] for turn in range(4) for i in range(3)]
