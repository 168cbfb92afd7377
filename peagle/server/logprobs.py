"""Log-probabilities as the two APIs show them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peagle.engine.params import TokenLogprob

LEAST = -9999.0  # JSON has no infinity
LONE = "\N{REPLACEMENT CHARACTER}".encode()  # what bytes that are no character are in the text
MAX_SKIPPED = 8  # bytes of tokens that the text may lack before its next character


class Shown(NamedTuple):
    """A token as it is shown."""

    token: int
    name: str
    logprob: float
    bytes: bytes


class Entry(NamedTuple):
    """An emitted token, the likeliest ones in its place, and the characters of text before it."""

    own: Shown
    top: list[Shown]
    offset: int


@dataclass(slots=True)
class _Waiting:
    """An emitted token whose part of the text is not yet certain."""

    logprob: TokenLogprob
    own: bytes
    end: int  # of its bytes among those of all tokens
    shown: bytearray = field(default_factory=bytearray)


class AnswerLogprobs:
    """Tokens of one answer as its text becomes certain.

    The text is shared out among the tokens, so their bytes, one after another, are its UTF-8: a
    token that is part of a character has its own bytes. What a stop string cut off is no token's.
    Bytes that are no character are U+FFFD in the text, and in the bytes, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokens = tokenizer.backend_tokenizer
        self._added = tokenizer.added_tokens_decoder
        byte_level = "ByteLevel" in repr(self._tokens.decoder)
        letters = bytes_to_unicode() if byte_level else {}
        self._letters = {letter: byte for byte, letter in letters.items()}
        self._waiting = list[_Waiting]()
        self._bytes = bytearray()  # of all tokens
        self._owners = list[_Waiting]()  # of each of them
        self._found = 0  # bytes up to there are in the text, or will not be
        self._characters = 0  # of the text that was told

    def push(self, tokens: list[TokenLogprob], text: str, ended: bool) -> list[Entry]:
        """Add tokens, and text that is certain; returns the tokens whose text is."""
        for logprob in tokens:
            own = self._bytes_of(logprob.token)
            self._bytes += own
            self._waiting.append(_Waiting(logprob, own, len(self._bytes)))
            self._owners += self._waiting[-1:] * len(own)
        for character in text:
            self._share(character.encode(errors="replace"))
        certain = sum(ended or waiting.end <= self._found for waiting in self._waiting)
        told, self._waiting = self._waiting[:certain], self._waiting[certain:]
        return list(map(self._entry, told))

    def _share(self, character: bytes) -> None:
        """Give the bytes of a character to the tokens that have them; all to the next token where
        none has."""
        skipped = 0 if character == LONE else MAX_SKIPPED
        at = self._bytes.find(character, self._found, self._found + len(character) + skipped)
        if at < 0:
            rest = self._owners[self._found :][:1] or self._waiting[-1:]
            rest[0].shown += character
            self._found += character == LONE
            return
        self._found = at + len(character)
        for owner, byte in zip(self._owners[at : self._found], character, strict=True):
            owner.shown.append(byte)

    def _entry(self, told: _Waiting) -> Entry:
        token, logprob, top = told.logprob
        begins = [byte & 0xC0 != 0x80 for byte in told.shown]  # a character, or goes on with one
        offset = self._characters - (begins[:1] == [False])
        self._characters += sum(begins)
        whole = told.shown and told.own.endswith(told.shown)  # but for a space that begins a text
        name = self._name(token, bytes(told.shown) if whole else told.own)
        own = Shown(token, name, max(logprob, LEAST), bytes(told.shown))
        return Entry(
            own, [own if other == token else self._shown(other, p) for other, p in top], offset
        )

    def _shown(self, token: int, logprob: float) -> Shown:
        own = self._bytes_of(token)
        return Shown(token, self._name(token, own), max(logprob, LEAST), own)

    def _bytes_of(self, token: int) -> bytes:
        """Bytes of a token in the midst of a text; a special token has none."""
        if token in self._added and self._added[token].special:
            return b""
        piece = self._tokens.id_to_token(token) or ""
        if self._letters.keys() >= set(piece):
            return bytes(map(self._letters.__getitem__, piece))
        if piece.startswith("<0x"):  # Llama 2, Gemma
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()

    def _name(self, token: int, text: bytes) -> str:
        """The text of a token. Bytes that are none are written as OpenAI does."""
        if not text:
            return self._added[token].content if token in self._added else by_id(token)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def by_id(token: int) -> str:
    """The name of a token that its text does not tell, as vLLM writes it."""
    return f"token_id:{token}"


def of_chat(entries: list[Entry]) -> dict[str, Any]:
    """A list with an entry a token."""

    def told(token: Shown) -> dict[str, Any]:
        return {"token": token.name, "logprob": token.logprob, "bytes": list(token.bytes)}

    content = [told(own) | {"top_logprobs": list(map(told, top))} for own, top, _ in entries]
    return {"content": content, "refusal": None}


def of_text(entries: list[Entry]) -> dict[str, Any]:
    """Lists beside each other."""
    return {
        "tokens": [own.name for own, _, _ in entries],
        "token_logprobs": [own.logprob for own, _, _ in entries],
        "top_logprobs": [_by_name(own, top) for own, top, _ in entries],
        "text_offset": [offset for _, _, offset in entries],
    }


def _by_name(own: Shown, top: list[Shown]) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens and the emitted one. Where several have one name,
    it means the emitted one, or else the likeliest; the others go by their ids."""
    names = dict[str, Shown]()
    for token in (own, *top):
        known = names.setdefault(token.name, token)
        if known.token != token.token:
            names[by_id(token.token)] = token
    return {name: token.logprob for name, token in names.items()}
