"""The content of a data file, in numbers and token by token."""

from pathlib import Path
from typing import Any

from json_files import write_lines
from refusals import refused
from tiny import make_tokenizer

from peagle.cli.data import nth_record, pieces, summarize
from peagle.data.chat import encode_documents
from peagle.data.dataset import documents_of, read_examples

TOKENIZER = make_tokenizer()
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on\nthe mat"}]


def write(folder: Path, *records: Any) -> Path:
    return write_lines(folder / "data.jsonl", *records)


def ids(prompt: int, answer: int, **more: Any) -> dict[str, Any]:
    return {"prompt_ids": [9] * prompt, "answer_ids": [8] * answer, **more}


def test_the_numbers_of_a_file(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        ids(4, 6, kind="chat"),
        ids(3, 30, kind="chat"),
        ids(20, 5, kind="math"),  # no answer within 16 tokens
        {"messages": TALK[:1], "kind": "code"},
        ids(2, 3, kind="chat"),
    )
    assert summarize(file, TOKENIZER, 16) == {
        "records": 5,
        "documents": 3,
        "tokens": 10 + 16 + 5,
        "answer_tokens": 6 + 13 + 3,
        "cut": 1,
        "lengths": {"p0": 5, "p10": 5, "p50": 10, "p90": 33, "p99": 33, "p100": 33},
        "unusable": 2,
        "reasons": [
            "record 3: no answer to train on within `max_length` 16",
            "record 4: the conversation has no assistant turn to train on",
        ],
    }


def test_they_are_those_of_training(tmp_path: Path) -> None:
    file = write(tmp_path, ids(4, 6), {"messages": TALK * 2}, ids(20, 5), ids(3, 30))
    for max_length in (8, 16, 99):
        examples = read_examples(file, TOKENIZER, max_length)
        found = summarize(file, TOKENIZER, max_length)
        assert found["documents"] == len(examples)
        assert found["tokens"] == sum(len(example.ids) for example in examples)
        assert found["answer_tokens"] == sum(sum(example.supervised) for example in examples)


def test_only_the_first_reasons_are_given(tmp_path: Path) -> None:
    found = summarize(write(tmp_path, ids(1, 9), *[{}] * 20), TOKENIZER)
    assert (found["unusable"], len(found["reasons"])) == (20, 5)


def test_pieces_are_the_whole_text_marked_where_supervised() -> None:
    [example] = encode_documents(TOKENIZER, TALK)
    found = list(pieces(example, TOKENIZER))
    assert "".join(text for text, _ in found) == TOKENIZER.decode(example.ids)
    assert [text for text, mine in found if mine] == ["sat on\nthe mat<|im_end|>"]
    assert [mine for _, mine in found] == [False, True, False]


def test_records_are_counted_from_one(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": 1}, {"a": 2})
    assert [nth_record(file, number) for number in (1, 2)] == [{"a": 1}, {"a": 2}]
    with refused("record"):
        nth_record(file, 3)


def test_documents_whole_and_cut() -> None:
    [(whole, cut)] = documents_of(ids(3, 9), TOKENIZER, 8)
    assert (len(whole.ids), len(cut.ids), sum(cut.supervised)) == (12, 8, 5)
    with refused():
        documents_of(ids(1, 1), TOKENIZER)
    with refused():
        documents_of({"prompt_ids": [], "answer_ids": []}, TOKENIZER)
