"""Text from tokens: whole characters, stop strings held back and cut."""

import pytest
from tiny import make_target, make_tokenizer
from transformers import GenerationConfig

from peagle.engine.text import TextStream, end_tokens

TOKENIZER = make_tokenizer()


def letters(text: str) -> list[int]:
    return [TOKENIZER.convert_tokens_to_ids(c) for c in text]


def push_all(stream: TextStream, ids: list[int]) -> list[tuple[str, bool]]:
    return [stream.push(token) for token in ids]


def test_text_without_stops_comes_at_once() -> None:
    stream = TextStream(TOKENIZER, ())
    assert push_all(stream, letters("abc")) == [("a", False), ("b", False), ("c", False)]
    assert (stream.finish(), stream.text) == ("", "abc")


def test_what_may_become_a_stop_is_held_back() -> None:
    stream = TextStream(TOKENIZER, ("abx", "bcd"))
    pushed = push_all(stream, letters("aabcd"))
    assert [text for text, _ in pushed[:4]] == ["", "a", "", "a"]  # "a", "ab", then "bc" wait
    assert pushed[4] == ("", True)
    assert stream.text == "aa"


def test_the_earliest_stop_wins_within_a_token() -> None:
    stream = TextStream(TOKENIZER, ("he", "t"))
    the = TOKENIZER.convert_tokens_to_ids("the")
    assert TOKENIZER.decode([the]) == "the"
    assert stream.push(letters("x")[0]) == ("x", False)
    assert stream.push(the) == ("", True)
    assert stream.text == "x"


def test_finish_gives_what_was_held() -> None:
    stream = TextStream(TOKENIZER, ("abc",))
    push_all(stream, letters("zab"))
    assert stream.text == "z"
    assert (stream.finish(), stream.text) == ("ab", "zab")
    assert stream.finish() == ""


def test_special_tokens_have_no_text() -> None:
    stream = TextStream(TOKENIZER, ())
    assert [text for text, _ in push_all(stream, [1, *letters("a"), 2])] == ["", "a", ""]


@pytest.mark.parametrize("text", ["é", "日", "👍"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    """A byte-level tokenizer without merges: every byte of a character is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer(text + "!")["input_ids"]
    assert len(ids) == len(text.encode()) + 1
    pieces = [piece for piece, _ in push_all(TextStream(tokenizer, ()), ids)]
    assert pieces == [""] * (len(ids) - 2) + [text, "!"]


@pytest.mark.parametrize(
    ("named", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9}), ([2], {2})]
)
def test_end_tokens(named: int | list[int] | None, expected: set[int]) -> None:
    target = make_target()
    target.model.generation_config = GenerationConfig(eos_token_id=named)
    assert end_tokens(target) == expected | {2}, "the tokenizer's eos too"
    target.tokenizer.eos_token = None
    assert end_tokens(target) == expected
