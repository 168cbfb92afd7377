"""Exactly what the assistant said is supervised."""

from typing import Any

import pytest
from tiny import make_tokenizer

from peagle.config import InputError
from peagle.data.chat import encode_conversation, prompt_ids, render, to_messages

TOKENIZER = make_tokenizer()
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "the cat sat"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "it ran!\n\nfar"},
]


def said(ids: list[int], supervised: list[bool]) -> list[str]:
    """Text of every supervised run."""
    runs, current = list[str](), list[int]()
    for token, mine in [*zip(ids, supervised, strict=True), (0, False)]:
        if mine:
            current.append(token)
        elif current:
            runs.append(TOKENIZER.decode(current))
            current = []
    return runs


def test_answers_and_their_end_of_turn_are_supervised() -> None:
    ids, supervised = encode_conversation(TOKENIZER, TALK)
    assert said(ids, supervised) == ["the cat sat<|im_end|>", "it ran!\n\nfar<|im_end|>"]
    assert TOKENIZER.decode(ids) == render(TOKENIZER, TALK, answer=False)
    assert not supervised[-1] and TOKENIZER.decode(ids[-1:]) == "\n", "the newline behind is not"


def test_every_prefix_is_what_the_engine_is_asked() -> None:
    """Training sees the prompt's very tokens before the first supervised one."""
    ids, supervised = encode_conversation(TOKENIZER, TALK)
    assert ids[: supervised.index(True)] == prompt_ids(TOKENIZER, TALK[:2])


def test_the_users_words_in_an_answer_do_not_confuse() -> None:
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the cat"}]
    ids, supervised = encode_conversation(TOKENIZER, talk)
    assert said(ids, supervised) == ["the cat<|im_end|>"]


def test_a_conversation_that_ends_with_the_user() -> None:
    ids, supervised = encode_conversation(TOKENIZER, TALK[:4])
    assert said(ids, supervised) == ["the cat sat<|im_end|>"]


def test_an_empty_answer_is_its_end_of_turn() -> None:
    talk = [TALK[1], {"role": "assistant", "content": ""}]
    assert said(*encode_conversation(TOKENIZER, talk)) == ["<|im_end|>"]


def test_no_assistant_turn() -> None:
    with pytest.raises(InputError, match="no assistant turn"):
        encode_conversation(TOKENIZER, TALK[:2])


def test_a_template_that_rewrites_earlier_turns() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InputError, match="rewrites earlier turns"):
        encode_conversation(tokenizer, TALK)


def test_no_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        prompt_ids(tokenizer, TALK)


def test_prompt_opens_the_answer() -> None:
    text = TOKENIZER.decode(prompt_ids(TOKENIZER, TALK[:2]))
    assert text.endswith("<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\n")


def test_to_messages() -> None:
    assert to_messages({"messages": TALK}) == TALK
    shared = [("system", "be brief"), ("human", "hi"), ("gpt", "yes")]
    record = {"conversations": [{"from": role, "value": text} for role, text in shared]}
    assert to_messages(record) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "needs 'messages'"),
        ({"messages": []}, "needs 'messages'"),
        ({"messages": "hi"}, "needs 'messages'"),
        ({"messages": ["hi"]}, "a turn is 'hi'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text"),
        ({"messages": [{"content": "x"}]}, "role None"),
    ],
)
def test_bad_records(record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_messages(record)
