"""The target's own answers on disk: exact, all turns, and never lost or doubled by a kill."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_target

from peagle.config import InputError
from peagle.data.chat import prompt_ids
from peagle.data.regenerate import regenerate
from peagle.engine.llm import LLM
from peagle.engine.request import SamplingParams

GREEDY = SamplingParams(max_tokens=6)
TURNS = [["the cat"], ["the hat", "and then", "what"], ["a day"], ["mat", "sat"], ["ran"]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(make_target(), max_batch=1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in TURNS))
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_turn_has_the_targets_greedy_answer(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert regenerate(llm, prompts, output, GREEDY) == 8
    records = read(output)
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


def test_a_kill_anywhere_loses_and_doubles_nothing(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    regenerate(llm, prompts, whole, GREEDY)
    data = whole.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for size in sorted({0, 1, 5, *ends, *(end - 1 for end in ends), *range(20, len(data), 211)}):
        cut.write_bytes(data[:size])
        regenerate(llm, prompts, cut, GREEDY)
        assert cut.read_bytes() == data, size


def test_groups_are_on_disk_before_the_next_begins(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    output, reports = tmp_path / "out.jsonl", []

    def killed(done: int, total: int) -> None:
        reports.append((done, total))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(llm, prompts, output, GREEDY, on_record=killed)
    assert reports == [(4, 5)]
    assert {record["record"] for record in read(output)} == {0, 1, 2, 3}
    regenerate(
        llm, prompts, output, GREEDY, on_record=lambda done, total: reports.append((done, total))
    )
    assert reports == [(4, 5), (5, 5)]


def test_limit_can_be_raised_and_lowered(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert [regenerate(llm, prompts, output, GREEDY, n) for n in (1, 4, 2, None)] == [1, 6, 0, 1]
    assert [record["record"] for record in read(output)] == [0, 1, 1, 1, 2, 3, 3, 4]


def test_the_file_is_read_once(
    llm: LLM, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    regenerate(llm, prompts, output, GREEDY)
    reads, real = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(self) or real(self))
    regenerate(llm, prompts, output, GREEDY)
    assert reads == [output]


def test_turns_that_do_not_fit_are_left_out(llm: LLM, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    too_long = "the cat sat on the mat " * 60
    records = [["ran", too_long, "hat"], [too_long], ["mat"]]
    prompts.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in records))
    assert regenerate(llm, prompts, output, GREEDY) == 2
    assert [record["record"] for record in read(output)] == [0, 2]


@pytest.mark.parametrize(
    "foreign", ['{"turns": ["hi"]}\n', '{"turns": ["hi"]}', "text\nmore", "[1]\n"]
)
def test_another_file_is_left_as_it_was(
    llm: LLM, prompts: Path, tmp_path: Path, foreign: str
) -> None:
    output = tmp_path / "mine.jsonl"
    output.write_text(foreign)
    with pytest.raises(InputError, match=r"mine.jsonl:1: not written by .*: name another file"):
        regenerate(llm, prompts, output, GREEDY)
    assert output.read_text() == foreign
