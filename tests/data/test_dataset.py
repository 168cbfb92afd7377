"""JSONL in, prompts and documents out; what is wrong is named with its file and line."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from json_files import write_lines
from refusals import refused
from tiny import CHATML, make_tokenizer

from peagle.data.chat import Style, encode_documents
from peagle.data.dataset import read_conversations, read_examples, read_prompts
from peagle.data.records import read_records

TOKENIZER = make_tokenizer()
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]


def write(folder: Path, *lines: Any) -> Path:
    return write_lines(folder / "data.jsonl", *lines)


def test_records_plain_and_gzip(tmp_path: Path) -> None:
    records = [{"a": 1}, {"b": "é"}]
    plain = write(tmp_path, records[0], "", records[1])
    assert list(read_records(plain)) == records
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_records(str(packed))) == records


@pytest.mark.parametrize(
    ("line", "message"),
    [("[1]", "expected a JSON object, found list"), ('"x"', "expected a JSON object, found str")],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, {"a": 1}, "", line)
    with refused() as caught:
        list(read_records(file))
    assert str(caught.value).startswith(f"{file}:3: {message}")


@pytest.mark.parametrize("text", ['[\n  {"a": 1}\n]\n', '[{"a": 1}]\n'])
def test_an_array_of_records_can_be_turned_into_lines(tmp_path: Path, text: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(text)
    with refused() as caught:
        list(read_records(file))
    assert caught.value.value == Path(f"{file}:1")
    assert caught.value.fix == "give one JSON object a line: jq -c '.[]' FILE"


def test_unreadable_files(tmp_path: Path) -> None:
    with refused():
        list(read_records(tmp_path / "absent.jsonl"))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"a": 1}\n{"a": "\xe9"}\n')
    with refused():
        list(read_records(latin))
    for content in (b"{}\n", gzip.compress(b"{}\n" * 99)[:20]):
        packed = tmp_path / "bad.jsonl.gz"
        packed.write_bytes(content)
        with refused():
            list(read_records(packed))


def test_prompts(tmp_path: Path) -> None:
    shared = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]
    file = write(tmp_path, {"turns": ["a", "b"]}, {"messages": TALK}, {"conversations": shared})
    assert read_prompts(file) == [["a", "b"], ["the cat"], ["one"]]


def test_a_null_is_no_value(tmp_path: Path) -> None:
    """A row of a table has the keys of all rows."""
    row: dict[str, Any] = dict.fromkeys(("turns", "question", "messages", "answer_ids"))
    file = write(tmp_path, row | {"question": "why?"}, row | {"messages": TALK})
    assert read_prompts(file) == [["why?"], ["the cat"]]
    examples = read_examples(write(tmp_path, row | {"messages": TALK}), TOKENIZER, 99)
    assert list(examples) == encode_documents(TOKENIZER, TALK)


@pytest.mark.parametrize("turns", [[], ["a", " "], [3], "", {"a": "b"}, None])
def test_bad_prompts(tmp_path: Path, turns: object) -> None:
    """The last record is a conversation in which the user has no turn."""
    record = {"messages": TALK[1:]} if turns is None else {"turns": turns}
    with refused() as error:
        read_prompts(write(tmp_path, {"turns": ["a"]}, record))
    assert "record 2: turns: must be a list of non-empty texts" in error.value.why


def test_a_record_without_prompts(tmp_path: Path) -> None:
    with refused() as error:
        read_prompts(write(tmp_path, {"turns": ["a"]}, {}))
    assert "record 2: needs 'turns', or needs 'messages'" in error.value.why


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]}
SYSTEM, RESULT = {"role": "system", "content": "be kind"}, {"role": "tool", "content": "mat"}


@pytest.mark.parametrize(
    ("messages", "roles"),
    [
        ([user("a"), TALK[1], user("b")], ["user", "user"]),
        ([user("a"), user("b")], ["user", "user"]),  # each gets its answer
        ([SYSTEM, user("a"), TALK[1]], ["system user"]),
        ([TALK[1], user("a")], ["user"]),  # a greeting that nobody asked for
        ([user("a"), CALL, RESULT, TALK[1], user("b")], ["user assistant tool", "user"]),
        ([user("a"), CALL, RESULT, user("b")], ["user assistant tool", "user"]),
        ([user("a"), TALK[1], user("b"), CALL], ["user"]),  # no result to go on from
    ],
)
def test_the_turns_of_a_conversation(tmp_path: Path, messages: list, roles: list[str]) -> None:
    [conversation] = read_conversations(write(tmp_path, {"messages": messages}))
    assert [" ".join(m["role"] for m in ask) for ask in conversation.asks] == roles


def test_a_system_prompt_goes_before_records_without_one(tmp_path: Path) -> None:
    file = write(tmp_path, {"turns": ["a", "b"]}, {"messages": [SYSTEM, *TALK]})
    first, second = read_conversations(file, "be brief")
    brief = {"role": "system", "content": "be brief"}
    assert first.asks == [[brief, user("a")], [user("b")]]
    assert second.asks == [[SYSTEM, TALK[0]]]
    assert read_prompts(file) == [["a", "b"], ["the cat"]]


def test_a_system_prompt_beside_the_turns(tmp_path: Path) -> None:
    """It is the record's own, for whatever turns, and trained with."""
    kind, none = {"system": "be kind"}, {"system": ""}
    records = [{"turns": ["a"]} | kind, {"messages": TALK} | kind, {"turns": ["a"]} | none]
    asked = [conversation.asks for conversation in read_conversations(write(tmp_path, *records))]
    assert asked == [[[SYSTEM, user("a")]], [[SYSTEM, TALK[0]]], [[user("a")]]]
    first, *_, last = read_conversations(tmp_path / "data.jsonl", "be brief")
    texts = [conversation.asks[0][0]["content"] for conversation in (first, last)]
    assert texts == ["be kind", "be brief"]
    [example] = list(read_examples(write(tmp_path, records[1]), TOKENIZER, 99))
    assert [example] == encode_documents(TOKENIZER, [SYSTEM, *TALK])


def test_template_arguments_override_the_records(tmp_path: Path) -> None:
    record = {"turns": ["a"], "tools": [{"name": "look"}], "template_args": {"x": 1, "y": 2}}
    [conversation] = read_conversations(write(tmp_path, record), None, {"x": 3})
    assert conversation.style == Style([{"name": "look"}], {"x": 3, "y": 2})


def test_nothing_to_answer(tmp_path: Path) -> None:
    with refused():
        read_conversations(write(tmp_path, {"messages": [user("a"), CALL]}))


def test_training_uses_the_template_arguments_of_the_line(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("{{ mood }}" + CHATML)
    records = [{"messages": TALK, "template_args": {"mood": mood}} for mood in ("gay", "sad")]
    for example, mood in zip(
        read_examples(write(tmp_path, *records), tokenizer, 99), ("gay", "sad"), strict=True
    ):
        assert tokenizer.decode(example.ids).startswith(mood)


def test_examples_of_both_kinds(tmp_path: Path) -> None:
    ids = {"prompt_ids": [9, 8, 7], "answer_ids": [6, 5]}
    examples = read_examples(write(tmp_path, ids, {"messages": TALK}), TOKENIZER, 100)
    assert examples[0] == ([9, 8, 7, 6, 5], [False] * 3 + [True] * 2)
    assert [examples[1]] == encode_documents(TOKENIZER, TALK)


def test_truncation_drops_documents_without_an_answer(tmp_path: Path) -> None:
    long, short = ({"prompt_ids": [9] * n, "answer_ids": [6] * 4} for n in (10, 3))
    (example,) = read_examples(write(tmp_path, long, short), TOKENIZER, 5)
    assert example == ([9, 9, 9, 6, 6], [False] * 3 + [True] * 2)
    with refused():
        read_examples(write(tmp_path, long, short), TOKENIZER, 3)


def test_an_answer_needs_a_token_to_be_predicted_from(tmp_path: Path) -> None:
    """Element (0, 0) predicts x[2]: answers that end before it teach nothing."""
    with refused():
        read_examples(write(tmp_path, {"prompt_ids": [9], "answer_ids": [6]}), TOKENIZER, 9)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": TALK[:1]}, "record 2: the conversation has no assistant turn"),
        ({"answer_ids": [1, 2]}, "record 2: `prompt_ids` and"),
        ({"prompt_ids": [1], "answer_ids": "ab"}, "record 2: `prompt_ids` and"),
        ({"prompt_ids": [1], "answer_ids": [1.5]}, "record 2: `prompt_ids` and"),
        ({"prompt_ids": [-1], "answer_ids": [1]}, "record 2: `prompt_ids` and"),
        ({"prompt_ids": [1, 2, 3], "answer_ids": [60000, 5, 6]}, "record 2: answer_ids 60000: "),
        ({"text": "x"}, "record 2: needs 'messages'"),
    ],
)
def test_bad_examples(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    file = write(tmp_path, {"prompt_ids": [9, 8], "answer_ids": [6]}, record)
    with refused() as caught:
        read_examples(file, TOKENIZER, 50)
    assert str(caught.value).startswith(str(file)) and message in str(caught.value)
