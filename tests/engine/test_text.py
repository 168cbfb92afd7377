"""Text from tokens: whole characters, stop strings held back and cut."""

import random
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import tiny
from tiny import make_target, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from peagle.engine.text import TextStream
from peagle.model.target import Target

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


def test_finish_ends_at_a_stop_among_held_bytes() -> None:
    """A line break is a byte token, and the text of bytes is known when their run ends."""
    stream = TextStream(byte_fallback(), ("\n", "!"))
    assert push_all(stream, [256, 0x0A, 0x21]) == [("x", False), ("", False), ("", False)]
    assert (stream.finish(), stream.text) == ("", "x")
    stream = TextStream(byte_fallback(), ("!",))
    push_all(stream, [256, 0x0A, 0x21])
    assert (stream.finish(), stream.text) == ("\n", "x\n")


def test_special_tokens_have_no_text() -> None:
    stream = TextStream(TOKENIZER, ())
    assert [text for text, _ in push_all(stream, [1, *letters("a"), 2])] == ["", "a", ""]


def byte_level() -> PreTrainedTokenizerFast:
    """Without merges: every byte of a character is one token."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_fallback() -> PreTrainedTokenizerFast:
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["x", "▁x", "▁", "▁the", "é", "\ufffd"]
    return PreTrainedTokenizerFast(tokenizer_object=tiny.byte_fallback(words))


def random_ids(generator: random.Random, size: int) -> list[int]:
    """Words, whole characters and stray bytes, in runs."""
    ids = list[int]()
    while len(ids) < 60:
        kind = generator.choice(("word", "character", "stray"))
        if kind == "character":
            ids += generator.choice("é日👍\u200d你").encode()
        else:
            first = 0x20 if kind == "word" else 0x80
            ids += generator.choices(range(first, size), k=generator.randint(1, 5))
    return ids


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_stream_is_what_a_tokenizer_decodes(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    """Whatever comes: lone bytes are U+FFFD, at the end, too."""
    tokenizer = make()
    for seed in range(40):
        ids = random_ids(random.Random(seed), len(tokenizer))
        stream = TextStream(tokenizer, ())
        pieces = [piece for piece, _ in push_all(stream, ids)] + [stream.finish()]
        assert "".join(pieces) == stream.text == tokenizer.decode(ids)


def test_a_lone_byte_after_a_character() -> None:
    tokenizer = byte_fallback()
    ids = [0xE4, 0xBD, 0xA0, 0xC3, 256, 256]
    stream = TextStream(tokenizer, ())
    pieces = [piece for piece, _ in push_all(stream, ids)]
    assert pieces == ["", "", "", "", "\ufffd" * 4 + "x", "x"]
    assert tokenizer.decode(ids) == stream.text


@pytest.mark.parametrize("ids", [[0x80], [0xE4, 0xBD], [256], [0xC3, 256]])
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_time_is_linear(
    make: Callable[[], PreTrainedTokenizerFast], ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens are decoded for each that comes."""
    tokenizer, decoded = make(), [0]
    stream = TextStream(tokenizer, ())
    taken = TextStream._decoded

    def counted(self: TextStream) -> str:
        decoded[0] += len(self._newest)
        return taken(self)

    monkeypatch.setattr(TextStream, "_decoded", counted)
    many = [min(token, len(tokenizer) - 1) for token in ids * 500]
    push_all(stream, many)
    stream.finish()
    assert decoded[0] < 20 * len(many)
    assert stream.text == tokenizer.decode(many)


def test_a_token_is_decoded_once_outside_runs_of_bytes() -> None:
    tokenizer = Mock(wraps=byte_fallback().backend_tokenizer)
    push_all(TextStream(Mock(backend_tokenizer=tokenizer), ()), [256, 257, 259, 256])
    assert tokenizer.decode.call_count == 4


@pytest.mark.parametrize("text", ["é", "日", "👍"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer(text + "!")["input_ids"]
    assert len(ids) == len(text.encode()) + 1
    pieces = [piece for piece, _ in push_all(TextStream(tokenizer, ()), ids)]
    assert pieces == [""] * (len(ids) - 2) + [text, "!"]


@pytest.mark.parametrize(
    ("named", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9}), ([2], {2})]
)
def test_end_tokens(named: int | list[int] | None, expected: set[int]) -> None:
    made = make_target()
    made.model.generation_config = GenerationConfig(eos_token_id=named)
    target = Target(made.model, made.tokenizer, made.name)
    assert target.tokenizer is not None
    assert target.end_tokens == expected | {2}, "the tokenizer's eos too"
    target.tokenizer.eos_token = None
    assert target.end_tokens == expected
