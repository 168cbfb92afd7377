"""heads/more.py asks what its files have: as many prompts of a kind as there are texts for it. It
writes all answers, or none; so does heads/answers.py."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from json_files import read_lines, write_lines

NAMES = ("answers", "prompts", "more")  # of modules in heads/; tests have an `answers`, too


@pytest.fixture
def more(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "heads")
    yield import_module("more")
    for name in NAMES:
        del sys.modules[name]


@pytest.mark.parametrize("count", [0, 3])
def test_few_texts_give_few_prompts(more: Any, count: int) -> None:
    texts = [f"A text, number {n}. It is about cats." for n in range(count)]
    pool = more.Pool(["why?"], texts, ["def f():"])
    asked = more.could_be_asked(more.Material(pool, short=texts, plain=texts))
    kinds = len(more.OF_TEXTS) + len(more.OF_PROMPTS)
    assert len(asked) == 1 + count * (1 + kinds) + len(more.COMPLETE)


@pytest.mark.parametrize("left", [False, True])
def test_a_run_that_is_stopped_leaves_no_part(
    more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """data.sh would take it for the whole; what a kill left is not kept either."""
    monkeypatch.setattr(sys, "argv", ["more.py", "prompts", str(tmp_path), "answers"])
    monkeypatch.setattr(more, "Packed", lambda lines: None)
    monkeypatch.setattr(more, "lines_of", lambda packed, output: [])
    monkeypatch.setattr(more, "material", lambda *files: None)
    monkeypatch.setattr(more, "could_be_asked", lambda made_from: [["a"], ["b"], ["c"]])
    output = tmp_path / "more.jsonl"
    stopped = [2]

    def answered(engine: None, number: int, turns: list[str]) -> Any:
        if number in stopped:
            raise KeyboardInterrupt
        return SimpleNamespace(lines=[{"record": number}]) if number != 1 else None

    monkeypatch.setattr(more, "answered", answered)
    with pytest.raises(KeyboardInterrupt):
        more.main()
    assert list(tmp_path.iterdir()) == []
    if left:
        (tmp_path / ".more.jsonl").write_text('{"record": 7}\n')
    stopped.clear()
    more.main()
    assert output.read_text() == '{"record": 0}\n{"record": 2}\n'
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("left", [False, True])
def test_unpacking_that_is_stopped_leaves_no_part(
    more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """data.sh would have the target answer the rest, for hours."""
    answers, output = sys.modules["answers"], tmp_path / "greedy.jsonl"
    stopped = [True]

    def regenerate(engine: None, asked: list[Any], made: Path, params: Any) -> None:
        with made.open("a") as file:
            file.write('{"record": 0}\n')
        raise KeyboardInterrupt if stopped else answers.Missing

    monkeypatch.setattr(answers, "Packed", lambda lines: None)
    monkeypatch.setattr(answers, "lines_of", lambda packed, file: [])
    monkeypatch.setattr(answers, "read_conversations", lambda prompts: [])
    monkeypatch.setattr(answers, "regenerate", regenerate)
    with pytest.raises(KeyboardInterrupt):
        answers.unpack(Path("packed"), Path("prompts"), output)
    assert list(tmp_path.iterdir()) == []
    if left:
        (tmp_path / ".greedy.jsonl").write_text('{"record": 7}\n')
    stopped.clear()
    answers.unpack(Path("packed"), Path("prompts"), output)
    assert output.read_text() == '{"record": 0}\n', "an answer that is missing ends it"
    assert list(tmp_path.iterdir()) == [output]


def test_unpacking_of_written_prompts_is_whole(
    more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, output = sys.modules["answers"], tmp_path / "synth.jsonl"
    line = {"user": "why?", "kind": "chat", "draw": 3}

    def answer_turn(engine: None, records: list[Any], params: Any) -> None:
        for record in records:
            record.add_answer({"role": "assistant", "content": "so"}, {"answer_ids": [1]})

    monkeypatch.setattr(answers, "Packed", lambda lines: None)
    monkeypatch.setattr(answers, "lines_of", lambda packed, file: [line])
    monkeypatch.setattr(answers, "answer_turn", answer_turn)
    (tmp_path / ".synth.jsonl").write_text('{"record": 7}\n')
    answers.unpack_synth(Path("packed"), output)
    [record] = read_lines(output)
    assert (record["record"], record["kind"], record["draw"]) == (0, "chat", 3)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"file": "greedy.jsonl", "answer_ids": [1]}, "its records have no prompt_ids; name what"),
        ({"prompt": "def f():"}, "record 1: needs 'turns', or needs 'messages'"),
    ],
)
def test_files_that_cannot_be_used_are_told_in_a_line(
    more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], why: str
) -> None:
    """Packed answers, and OpenAI's file of HumanEval."""
    prompts, file = sys.modules["prompts"], write_lines(tmp_path / "data.jsonl", record)
    monkeypatch.setattr(prompts, "load_tokenizer", lambda name: None)
    answers = [file] if "file" in record else []
    with pytest.raises(SystemExit) as ended:
        prompts.run(lambda: prompts.collect("target", file, answers))
    [line] = str(ended.value).splitlines()
    assert str(file) in line and why in line
