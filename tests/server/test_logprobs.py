"""Log-probabilities beside the text: bytes, names and offsets, whole and streamed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
from serving import ended_request
from tiny import make_target
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams, TokenLogprob
from peagle.engine.text import TextStream
from peagle.model.target import Target
from peagle.server.answers import ChatBuilder, TextBuilder
from peagle.server.logprobs import by_id

SPECIAL = ["<eos>", "<|im_end|>"]


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's and Qwen's; "日" is two tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("æ", "Ĺ"), ("Ġ", "c"), ("Ġc", "a")]
    words = [*letters, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return finished(backend)


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's and Gemma's."""
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["▁", "A", "x", "▁the", "▁cat", "é", "\ufffd", "日", "▁日本"]
    return finished(tiny.byte_fallback(words))


def finished(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """With special tokens, and added ones that are text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens([AddedToken("<日>", special=False)])
    return tokenizer


both = pytest.mark.parametrize("make", [byte_level, byte_fallback])


Parts = list[tuple[list[TokenLogprob], str]]


def rounds(tokenizer: PreTrainedTokenizerFast, ids: list[int], stop: tuple[str, ...] = ()) -> Parts:
    """Tokens and certain text, one token a round, as the engine emits them."""
    stream, found = TextStream(tokenizer, stop), []
    for number, token in enumerate(ids, start=1):
        text, stopped = stream.push(token)
        if stopped or number == len(ids):
            text += stream.finish()
        found.append(([TokenLogprob(token, -1.0, [(token, -1.0), (7, -2.0)])], text))
        if stopped:
            break
    return found


def told(build: Any, parts: Parts, stream: bool) -> dict[str, list[Any]]:
    """The log-probabilities of an answer: lists by name."""
    if not stream:
        logprobs, text = [p for more, _ in parts for p in more], "".join(t for _, t in parts)
        whole = build(ended_request(text, asked=2, logprobs=logprobs)).whole()
        return whole.model_dump()["logprobs"]
    form = build(ended_request(asked=2))
    found: dict[str, list[Any]] = {}
    for number, (logprobs, text) in enumerate(parts, start=1):
        ended = number == len(parts)
        part = form.part(text, logprobs, ended=ended).model_dump()
        for name, values in (part["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values or [])
    return found


def chat(tokenizer: Any, parts: Parts, stream: bool) -> list[Any]:
    """Entries of /v1/chat/completions."""
    return told(partial(ChatBuilder, tokenizer, 0), parts, stream)["content"]


def joined(entries: list[Any]) -> bytes:
    return bytes(byte for entry in entries for byte in entry["bytes"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["the cat 日本 é👍x", "é", "👍", " \n日 本", "a<日>b", "A cat"])
@both
def test_bytes_are_those_of_the_text(make: Callable[[], Any], text: str, stream: bool) -> None:
    tokenizer = make()
    ids = tokenizer(text.replace(" ", "▁") if make is byte_fallback else text)["input_ids"]
    entries = chat(tokenizer, rounds(tokenizer, ids), stream)
    assert len(entries) == len(ids)
    assert joined(entries) == tokenizer.decode(ids).encode()
    assert text.strip() in tokenizer.decode(ids)
    for entry in entries:
        if entry["bytes"] and not entry["token"].startswith("bytes:"):
            assert bytes(entry["bytes"]).decode() == entry["token"]


@both
def test_a_part_of_a_character_has_its_own_bytes(make: Callable[[], Any]) -> None:
    tokenizer = make()
    ids = tokenizer("👍")["input_ids"]
    entries = chat(tokenizer, rounds(tokenizer, ids), stream=False)
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in "👍".encode()]
    assert [entry["token"] for entry in entries] == [f"bytes:\\x{b:02x}" for b in "👍".encode()]
    assert entries[0]["top_logprobs"][0]["bytes"] == [0xF0]


def test_spaces_of_words() -> None:
    """A text begins without one; alternatives have theirs."""
    tokenizer = byte_fallback()
    the, cat = tokenizer.convert_tokens_to_ids(["▁the", "▁cat"])
    entries = chat(tokenizer, rounds(tokenizer, [the, cat, the]), stream=True)
    assert [entry["token"] for entry in entries] == ["the", " cat", " the"]
    assert joined(entries) == b"the cat the"


@pytest.mark.parametrize("stream", [False, True])
@both
def test_special_tokens_have_no_bytes(make: Callable[[], Any], stream: bool) -> None:
    tokenizer = make()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    x = tokenizer.convert_tokens_to_ids("x")
    entries = chat(tokenizer, rounds(tokenizer, [end, x, end]), stream)
    found = [(entry["token"], entry["bytes"]) for entry in entries]
    assert found == [("<|im_end|>", []), ("x", [120]), ("<|im_end|>", [])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["at", "t 日", "本", "a"])
@both
def test_a_stop_cuts_a_tokens_bytes(make: Callable[[], Any], stop: str, stream: bool) -> None:
    tokenizer = make()
    text = "x cat 日本x"
    ids = tokenizer(text.replace(" ", "▁") if make is byte_fallback else text)["input_ids"]
    parts = rounds(tokenizer, ids, (stop,))
    shown = "".join(text for _, text in parts)
    assert shown == text[: text.index(stop)]
    entries = chat(tokenizer, parts, stream)
    assert joined(entries) == shown.encode()
    assert len(entries) == len(parts)


@both
def test_bytes_that_are_no_character(make: Callable[[], Any]) -> None:
    """Such bytes are U+FFFD, as in the text; the characters around them stay."""
    tokenizer = make()
    raw = list("é".encode()) + [0xE4, 0xBD] + list(b"x") + [0xC3] + list("日".encode()) + [0xE4]
    spell = {byte: tokenizer(chr(byte))["input_ids"][0] for byte in b"x"}
    if make is byte_level:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        ids = [letters.index(bytes_to_unicode()[byte]) for byte in raw]
    else:
        ids = [spell.get(byte, byte) for byte in raw]
    for stream in (False, True):
        entries = chat(tokenizer, rounds(tokenizer, ids), stream)
        assert joined(entries) == tokenizer.decode(ids).encode()
        x = next(entry for entry in entries if entry["token"] == "x")
        assert x["bytes"] == [120]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stop", [(), ("a", "x", "日")])
@both
def test_whatever_a_target_says(make: Callable[[], Any], stop: tuple[str, ...], seed: int) -> None:
    """Answers of random tokens, most of them no text, in rounds of several tokens."""
    tokenizer, plain = make(), make_target(len(make()))
    target = Target(plain.model, tokenizer, "random")
    params = SamplingParams(temperature=9.0, seed=seed, logprobs=5, max_tokens=60, stop=stop)
    run = LLM(target, max_batch=1, kv_tokens=256).stream([[5, 6]], params)
    parts = [([chunk.logprob], chunk.text) for chunk in run if chunk.logprob is not None]
    [done] = run.completions()
    for stream in (False, True):
        entries = chat(tokenizer, parts, stream)
        assert joined(entries) == done.text.encode()
        assert len(entries) == len(done.token_ids)
        assert all(len(entry["top_logprobs"]) == 5 for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
@both
def test_offsets_are_of_the_text(make: Callable[[], Any], stream: bool) -> None:
    """In characters; a token inside a character has that character's."""
    tokenizer, text = make(), "x 👍 cat é日x"
    ids = tokenizer(text.replace(" ", "▁") if make is byte_fallback else text)["input_ids"]
    shown = told(partial(TextBuilder, tokenizer), rounds(tokenizer, ids), stream)
    assert len(shown["text_offset"]) == len(ids)
    for name, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if name.startswith("bytes:"):
            assert text[offset] in "👍é日"
        else:
            assert text[offset:].startswith(name)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_one_text_do_not_collide(stream: bool) -> None:
    """The name is the emitted token's, or the likeliest one's."""
    tokenizer = byte_fallback()
    letter, byte = tokenizer.convert_tokens_to_ids("A"), 0x41
    x, stray = tokenizer.convert_tokens_to_ids("x"), 0xE4
    top = [(letter, -0.5), (byte, -1.0), (x, -2.0), (stray, -3.0)]
    parts = [
        ([TokenLogprob(x, -2.0, top)], "x"),
        ([TokenLogprob(byte, -1.0, top)], "A"),
        ([TokenLogprob(letter, -0.5, top)], "A"),
    ]
    shown = told(partial(TextBuilder, tokenizer), parts, stream)
    assert shown["tokens"] == ["x", "A", "A"]
    assert [len(best) for best in shown["top_logprobs"]] == [4, 4, 4]
    plain, emitted, _ = shown["top_logprobs"]
    assert plain == {"x": -2.0, "A": -0.5, by_id(byte): -1.0, "bytes:\\xe4": -3.0}
    assert emitted == {"A": -1.0, by_id(letter): -0.5, "x": -2.0, "bytes:\\xe4": -3.0}


def test_an_emitted_token_that_was_not_likely() -> None:
    tokenizer = byte_level()
    x, y = tokenizer.convert_tokens_to_ids(["x", "y"])
    parts = [([TokenLogprob(x, -9.0, [(y, -0.1)])], "x")]
    shown = told(partial(TextBuilder, tokenizer), parts, stream=False)
    assert shown["top_logprobs"] == [{"x": -9.0, "y": -0.1}]
    assert shown["token_logprobs"] == [-9.0]
