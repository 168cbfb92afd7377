"""Records that cannot be used: a few are left out and counted by reason, many are refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_files import write_lines
from refusals import refused
from tiny import CHATML, make_tokenizer

from peagle.data.chat import Conversation, encode_documents
from peagle.data.dataset import read_conversations, read_examples, read_prompts
from peagle.data.records import read_records
from peagle.errors import InputWarning

TOKENIZER = make_tokenizer()
USER, ANSWER = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}
GOOD: dict[str, Any] = {"messages": [USER, ANSWER]}
CRITIC: dict[str, Any] = {"messages": [{"role": "critic", "content": "x"}]}
JUDGE: dict[str, Any] = {"messages": [{"role": "judge", "content": "x"}]}
FOREIGN: dict[str, Any] = {"prompt_ids": [1, 2], "answer_ids": [60_000]}
FOREIGN_TOO: dict[str, Any] = {"prompt_ids": [1, 2], "answer_ids": [70_000]}
# As Gemma and Mistral have it.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% endfor %}" + CHATML
)


def write(folder: Path, records: list[Any]) -> Path:
    return write_lines(folder / "data.jsonl", *records)


def examples(file: Path, **how: Any) -> list[Any]:
    return list(read_examples(file, TOKENIZER, 99, **how))


def conversations(file: Path, **how: Any) -> list[Any]:
    return [found for found in read_conversations(file, **how) if found.asks]


Read = Callable[..., list[Any]]
both = pytest.mark.parametrize("read", [examples, conversations])


@both
def test_a_few_are_left_out_and_counted(read: Read, tmp_path: Path) -> None:
    """Each reason with its count and its first record."""
    records = [GOOD] * 100
    records[6] = records[60] = CRITIC
    records[9] = JUDGE
    records[70] = {}
    file = write(tmp_path, records)
    with pytest.warns(InputWarning) as told:
        assert len(read(file)) == 96
    [text] = [str(warning.message) for warning in told]
    assert text.startswith(f"{file}: 4 of 100 records")
    assert "3 × record 7: messages[0] 'critic': " in text
    assert "'judge'" not in text
    assert "1 × record 71: needs '" in text


@both
def test_many_are_refused(read: Read, tmp_path: Path) -> None:
    file = write(tmp_path, [GOOD] * 94 + [CRITIC] * 6)
    with refused() as told:
        read(file)
    assert str(told.value).startswith(str(file)) and "record 95: messages[0]" in str(told.value)
    file = write(tmp_path, [GOOD] * 95 + [CRITIC] * 5)
    with pytest.warns(InputWarning, match="5 of 100"):
        assert len(read(file)) == 95


@both
def test_strict_refuses_the_first(read: Read, tmp_path: Path) -> None:
    file = write(tmp_path, [GOOD] * 90 + [CRITIC])
    with refused():
        read(file, strict=True)


@both
def test_good_files_give_no_warning(read: Read, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(write(tmp_path, [GOOD] * 3), strict=True)) == 3


def test_token_ids_of_another_target(tmp_path: Path) -> None:
    file = write(tmp_path, [GOOD] * 40 + [FOREIGN, FOREIGN_TOO])
    with pytest.warns(InputWarning, match="2 × record 41: answer_ids 60000: "):
        assert len(examples(file)) == 40


def test_answers_beyond_the_length_are_counted_but_no_fault(tmp_path: Path) -> None:
    long = {"prompt_ids": [9] * 120, "answer_ids": [8, 8]}
    file = write(tmp_path, [GOOD, long, long])
    with pytest.warns(InputWarning, match="2 × record 2: no answer to train on within"):
        assert len(examples(file)) == 1
    with pytest.warns(InputWarning):
        assert len(examples(file, strict=True)) == 1


def test_an_empty_file(tmp_path: Path) -> None:
    for lines in ([], ["", "  "]):
        file = tmp_path / "empty.jsonl"
        file.write_text("\n".join(lines))
        for read in (examples, conversations):
            with refused():
                read(file)


def test_records_keep_their_numbers(tmp_path: Path) -> None:
    """A run that goes on finds the record that it left."""
    file = write(tmp_path, [GOOD] * 10 + [CRITIC] + [GOOD] * 20)
    with pytest.warns(InputWarning):
        found = read_conversations(file)
    assert len(found) == 31 and [n for n, one in enumerate(found) if not one.asks] == [10]
    with pytest.warns(InputWarning):
        assert read_prompts(file) == [["the cat"]] * 30


def test_prompts_that_the_template_refuses(tmp_path: Path) -> None:
    """They are found before any of them is answered."""
    twice = {"messages": [USER, ANSWER, {"role": "system", "content": "x"}, USER]}
    tokenizer = make_tokenizer(ALTERNATING)
    file = write(tmp_path, [GOOD] * 40 + [twice])
    with pytest.warns(InputWarning, match="1 × record 41: the chat template refuses this: Conv"):
        found = read_conversations(file, tokenizer=tokenizer)
    assert found == [*read_conversations(file)[:40], Conversation([])]
    with refused():
        read_conversations(file, tokenizer=tokenizer, strict=True)


def test_turns_that_the_template_leaves_out(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML.replace("in messages", "in messages if m.role != 'tool'"))
    result = {"role": "tool", "content": "mat"}
    file = write(tmp_path, [GOOD] * 40 + [{"messages": [USER, ANSWER, result, ANSWER]}])
    with pytest.warns(InputWarning, match=r"record 41: messages\[2\] 'tool': "):
        assert len(read_examples(file, tokenizer, 99)) == 40
    with pytest.warns(InputWarning, match=r"record 41: messages\["):
        read_conversations(file, tokenizer=tokenizer)


CUT = "mat \ud83d"  # half of an emoji, which JSON can hold
CALL = {"name": "f", "arguments": '{"a": "\\ud83d"}'}  # JSON in a text
UNPAIRED: dict[str, dict[str, Any]] = {
    "answer": {"messages": [USER, {"role": "assistant", "content": CUT}]},
    "thought": {"messages": [USER, ANSWER | {"reasoning_content": CUT}]},
    "question": {"messages": [{"role": "user", "content": CUT}, ANSWER]},
    "turns": {"turns": ["the cat", CUT]},
    "call": {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]},
                          {"role": "tool", "content": "mat"}, ANSWER]},
    "tools": GOOD | {"tools": [{"name": CUT}]},
    "template argument": GOOD | {"template_args": {"date": CUT}},
}  # fmt: skip
REASON = r"record 41: (has half of a surrogate pair|messages\[1\] .*: not JSON)"


@pytest.mark.parametrize("where", sorted(UNPAIRED.keys() - {"turns"}))
def test_half_of_a_surrogate_pair_is_not_trained_on(where: str, tmp_path: Path) -> None:
    file = write(tmp_path, [GOOD] * 40 + [UNPAIRED[where]])
    with pytest.warns(InputWarning, match=REASON):
        assert len(examples(file)) == 40


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER])
@pytest.mark.parametrize("where", sorted(UNPAIRED.keys() - {"answer", "thought"}))
def test_half_of_a_surrogate_pair_is_not_asked(where: str, tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path, [GOOD] * 40 + [UNPAIRED[where]])
    with pytest.warns(InputWarning, match=REASON):
        assert len(conversations(file, tokenizer=tokenizer)) == 40


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    file = write(tmp_path, ['{"turns": ["mat \\ud83d\\ude00"]}'])
    assert read_prompts(file, strict=True) == [["mat \U0001f600"]]


def test_no_template_is_one_reason(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    with refused():
        read_examples(write(tmp_path, [GOOD] * 3), tokenizer, 99)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"a": "b\tc"}', "Invalid control character at column 9"),
        ('{"a": "b', "Unterminated string starting at column 7"),
        ('{"a": "b"', "Expecting ',' delimiter at column 10"),
        ('{"a": }', "Expecting value at column 7"),
        ('{"a" 1}', "Expecting ':' delimiter at column 6"),
        ('{"a": 1} {', "Extra data at column 10"),
    ],
)
def test_lines_that_are_no_json(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"a": 1}\n' + line + "\n")
    with refused() as told:
        list(read_records(file))
    assert str(told.value) == f"{file}:2: not JSON ({why})"


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000])
def test_json_that_python_does_not_read(tmp_path: Path, value: str) -> None:
    file = write(tmp_path, [{"a": 1}, f'{{"a": {value}}}'])
    with refused() as told:
        list(read_records(file))
    assert str(told.value).startswith(f"{file}:2: not JSON (")


def shown(document: Any) -> str:
    """The text of a document, what is trained on in brackets."""
    text, inside = "", False
    for token, mine in zip(*document, strict=True):
        text += (
            "[" * (mine and not inside) + "]" * (inside and not mine) + TOKENIZER.decode([token])
        )
        inside = mine
    return text


LEADING = [{"role": "assistant", "content": "hello"}, USER, ANSWER]


@pytest.mark.parametrize(
    ("template", "before"), [(CHATML, ""), (ALTERNATING, "<|im_start|>user\n<|im_end|>\n")]
)
def test_a_leading_answer_is_context(template: str, before: str) -> None:
    """An empty user turn comes first if the template demands that the user begins."""
    tokenizer = make_tokenizer(template)
    [document] = encode_documents(tokenizer, LEADING)
    assert shown(document) == (
        f"{before}<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n"
        "<|im_start|>assistant\n[sat<|im_end|>]\n"
    )


def test_leading_answers_after_a_system_turn() -> None:
    talk = [{"role": "system", "content": "be"}, LEADING[0], LEADING[0], USER, ANSWER]
    [document] = encode_documents(TOKENIZER, talk)
    assert shown(document).count("[") == 1 and shown(document).count("hello") == 2
    with refused():
        encode_documents(TOKENIZER, LEADING[:1])
