"""The target's own answers on disk: exact, all turns, and never lost or doubled by a kill."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from json_files import read_lines, write_lines
from refusals import refused
from stand_in import Answers, answering
from tiny import make_target

from peagle.data.chat import Conversation, prompt_ids
from peagle.data.dataset import read_conversations
from peagle.data.regenerate import regenerate as answer
from peagle.engine.llm import LLM
from peagle.engine.params import RequestFailure, SamplingParams
from peagle.engine.run import Completion

GREEDY = SamplingParams(max_tokens=6)
SYNTH = '{"record": 0, "kind": "chat", "draw": 0, "messages": []}\n'
TURNS = [["the cat"], ["the hat", "and then", "what"], ["a day"], ["mat", "sat"], ["ran"]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(make_target(), max_batch=1)


@pytest.fixture(scope="module")
def quick(llm: LLM) -> Any:
    """The same answers, each made once: what is tested is the file."""
    said: dict[tuple[int, ...], Completion] = {}

    def generate(prompts: list[list[int]], params: list[SamplingParams]) -> Answers:
        assert params == [GREEDY] * len(prompts)
        for number, ids in enumerate(map(tuple, prompts)):
            said[ids] = said.get(ids) or llm.generate([list(ids)], GREEDY)[0]
            yield number, said[ids]

    return answering(llm.tokenizer, llm.context, generate)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "prompts.jsonl", *({"turns": turns} for turns in TURNS))


def regenerate(
    source: LLM, prompts: Path, *rest: Any, limit: int | None = None, **named: Any
) -> int:
    """Answers written, nothing being too long or failing."""
    report = answer(source, read_conversations(prompts, limit=limit), *rest, **named)
    assert report[1:] == (0, 0, [])
    return report.answers


def test_every_turn_has_the_targets_greedy_answer(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert regenerate(llm, prompts, output, GREEDY) == 8
    records = read_lines(output)
    assert [record["record"] for record in records] == [0, 1, 1, 1, 2, 3, 3, 4]
    for record in records:
        *asked, answer = record["messages"]
        users = [m["content"] for m in record["messages"] if m["role"] == "user"]
        assert users == TURNS[record["record"]][: len(users)]
        assert record["prompt_ids"] == prompt_ids(llm.tokenizer, asked)
        plain = llm.generate([record["prompt_ids"]], GREEDY)[0]
        assert record["answer_ids"] == plain.token_ids
        assert answer == {"role": "assistant", "content": plain.text}
    first, second = records[1]["messages"], records[2]["messages"]
    assert second[:2] == first  # the second turn follows the target's own first answer


def test_batching_does_not_change_the_file(prompts: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "three.jsonl"]
    for file, batch in zip(files, (1, 3), strict=True):
        regenerate(LLM(make_target(), max_batch=batch), prompts, file, GREEDY)
    assert files[0].read_text() == files[1].read_text()


def test_a_kill_loses_and_doubles_nothing(quick: Any, prompts: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    regenerate(quick, prompts, whole, GREEDY)
    data = whole.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for size in sorted({0, 1, 5, *ends, *(end - 1 for end in ends), *range(20, len(data), 211)}):
        cut.write_bytes(data[:size])
        regenerate(quick, prompts, cut, GREEDY)
        assert cut.read_bytes() == data, size


def test_a_record_is_on_disk_when_it_and_all_before_it_have_ended(
    llm: LLM, quick: Any, prompts: Path, tmp_path: Path
) -> None:
    """Others are still being answered then; Ctrl-C also keeps those that ended out of order."""
    output, reports = tmp_path / "out.jsonl", list[tuple[int, int, int]]()

    def interrupted(ids: list[list[int]], params: list[SamplingParams]) -> Answers:
        answers = dict(quick.stream(ids, params).ended())
        yield 2, answers[2]
        assert read_lines(output) == []
        yield 0, answers[0]
        assert [record["record"] for record in read_lines(output)] == [0]
        yield 1, answers[1]  # the first of three turns
        raise KeyboardInterrupt

    stopped = answering(llm.tokenizer, llm.context, interrupted)
    with pytest.raises(KeyboardInterrupt):
        regenerate(stopped, prompts, output, GREEDY, on_answers=lambda *n: reports.append(n))
    assert [record["record"] for record in read_lines(output)] == [0, 2]
    lengths = [len(record["answer_ids"]) for record in read_lines(output)]
    assert reports == [(0, 8, 0), (1, 8, lengths[0]), (2, 8, sum(lengths))]
    regenerate(quick, prompts, output, GREEDY, on_answers=lambda *n: reports.append(n))
    assert [each[:2] for each in reports[3:]] == [(2, 8), (5, 8), (7, 8), (8, 8)]
    assert [record["record"] for record in read_lines(output)] == [0, 2, 1, 1, 1, 3, 3, 4]


def test_limit_can_be_raised_and_lowered(quick: Any, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    written = [regenerate(quick, prompts, output, GREEDY, limit=n) for n in (1, 4, 2, None)]
    assert written == [1, 6, 0, 1]
    assert [record["record"] for record in read_lines(output)] == [0, 1, 1, 1, 2, 3, 3, 4]


def test_records_may_stand_in_any_order(quick: Any, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    regenerate(quick, prompts, output, GREEDY)
    lines = output.read_text().splitlines(keepends=True)
    for order in ([7, 5, 6, 0], [4, 7, 1, 2, 3], [0, 5, 6, 4, 1, 2]):  # the last: a record cut
        output.write_text("".join(lines[i] for i in order))
        regenerate(quick, prompts, output, GREEDY)
        assert sorted(output.read_text().splitlines(keepends=True)) == sorted(lines)


def test_prompts_may_be_added_at_the_end(quick: Any, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    regenerate(quick, prompts, output, GREEDY)
    for turns, written in (([*TURNS, ["far"]], 1), (TURNS[:2], 0)):
        other = write_lines(tmp_path / "other.jsonl", *({"turns": each} for each in turns))
        assert regenerate(quick, other, output, GREEDY) == written
    assert [record["record"] for record in read_lines(output)] == [0, 1, 1, 1, 2, 3, 3, 4, 5]


def test_answers_to_other_prompts_are_left_alone(quick: Any, prompts: Path, tmp_path: Path) -> None:
    """Records are known by their numbers, so the prompts of these must be the same."""
    output = tmp_path / "out.jsonl"
    regenerate(quick, prompts, output, GREEDY)
    before = output.read_text() + '{"record": 4, "mess'
    output.write_text(before)
    other = write_lines(tmp_path / "other.jsonl", *({"turns": turns} for turns in TURNS[::-1]))
    with_tools = write_lines(
        tmp_path / "tools.jsonl", *({"turns": turns, "tools": [{"name": "f"}]} for turns in TURNS)
    )
    for asked in (
        read_conversations(other),
        read_conversations(prompts, "be brief"),
        read_conversations(prompts, None, {"think": False}),
        read_conversations(with_tools),
    ):
        with refused("output") as error:
            answer(quick, asked, output, GREEDY)
        assert error.value.why.startswith("holds answers to other prompts")
        assert output.read_text() == before


def conversations(*talks: list[str]) -> list[Conversation]:
    return [Conversation([[{"role": "user", "content": text}] for text in t]) for t in talks]


def test_a_turn_that_does_not_fit_ends_its_record(llm: LLM, tmp_path: Path) -> None:
    output, too_long = tmp_path / "out.jsonl", "the cat sat " * 99
    asked = conversations(["ran", too_long, "hat"], [too_long], ["mat"])
    assert answer(llm, asked, output, GREEDY) == (2, 3, 0, [])
    assert [line["record"] for line in read_lines(output)] == [0, 2]
    assert answer(llm, asked, output, GREEDY) == (0, 1, 0, [])


def test_the_kv_cache_may_have_less_room_than_the_context(tmp_path: Path) -> None:
    """A prompt that it cannot hold is left out, and answers are as long as it allows."""
    llm, output = LLM(make_target(), lookup=False, kv_tokens=64), tmp_path / "out.jsonl"
    asked = conversations(["ran"], ["the cat sat " * 30], ["mat"])
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert answer(llm, asked, output, params) == (2, 1, 0, [])
    lines = read_lines(output)
    assert [line["record"] for line in lines] == [0, 2]
    assert {len(line["prompt_ids"] + line["answer_ids"]) for line in lines} == {64}


def failing(llm: LLM, quick: Any, words: str) -> Any:
    """An engine that cannot answer prompts with these words."""

    def generate(prompts: list[list[int]], params: list[SamplingParams]) -> Answers:
        for number, done in quick.stream(prompts, params).ended():
            fails = words in llm.tokenizer.decode(prompts[number])
            yield number, replace(done, failure="NaN" if fails else None)

    return answering(llm.tokenizer, llm.context, generate)


@pytest.mark.parametrize(
    ("words", "report", "records"),
    [
        ("a day", (7, 1, 0, ["record 3: NaN"]), [0, 1, 1, 1, 3, 3, 4]),
        ("and then", (6, 2, 0, ["record 2: NaN"]), [0, 1, 2, 3, 3, 4]),
    ],
)
def test_a_turn_that_fails_ends_its_record(  # noqa: PLR0913, PLR0917 (fixtures)
    llm: LLM, quick: Any, prompts: Path, tmp_path: Path, words: str, report: Any, records: list[int]
) -> None:
    output, asked = tmp_path / "out.jsonl", read_conversations(prompts)
    assert answer(failing(llm, quick, words), asked, output, GREEDY) == report
    assert [line["record"] for line in read_lines(output)] == records


def test_a_target_that_answers_nothing_ends_the_run(
    llm: LLM, quick: Any, prompts: Path, tmp_path: Path
) -> None:
    asked = read_conversations(prompts)
    with pytest.raises(RequestFailure, match="record 1: NaN"):
        answer(failing(llm, quick, ""), asked, tmp_path / "out.jsonl", GREEDY)


def test_template_arguments_and_tools_are_used_and_recorded(tmp_path: Path) -> None:
    llm, output = LLM(make_target()), tmp_path / "out.jsonl"
    llm.tokenizer.chat_template = "{{ mood }}{{ tools | tojson }}" + llm.tokenizer.chat_template
    tools = [{"name": "look"}]
    prompts = write_lines(tmp_path / "prompts.jsonl", {"turns": ["the cat"], "tools": tools})
    conversations = read_conversations(prompts, "be brief", {"mood": "gay"})
    answer(llm, conversations, output, GREEDY)
    [line] = read_lines(output)
    assert (line["tools"], line["template_args"]) == (tools, {"mood": "gay"})
    assert [m["role"] for m in line["messages"]] == ["system", "user", "assistant"]
    assert llm.tokenizer.decode(line["prompt_ids"]).startswith('gay[{"name": "look"}]')
    assert answer(llm, conversations, output, GREEDY).answers == 0, "the next run knows them"


def test_a_conversation_that_the_template_refuses_is_named(prompts: Path, tmp_path: Path) -> None:
    llm, output = LLM(make_target()), tmp_path / "out.jsonl"
    refusal = "{% if messages | length > 2 %}{{ raise_exception('!') }}{% endif %}"
    llm.tokenizer.chat_template += refusal
    with refused("prompts") as error:
        answer(llm, read_conversations(prompts), output, GREEDY)
    assert "record 2: the chat template refuses" in error.value.why


@pytest.mark.parametrize(
    "foreign", ['{"turns": ["hi"]}\n', '{"turns": ["hi"]}', "text\nmore", "[1]\n", SYNTH]
)
def test_another_file_is_left_alone(llm: LLM, prompts: Path, tmp_path: Path, foreign: str) -> None:
    output = tmp_path / "mine.jsonl"
    output.write_text(foreign)
    with refused("output"):
        regenerate(llm, prompts, output, GREEDY)
    assert output.read_text() == foreign
