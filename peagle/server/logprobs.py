"""Log-probabilities in the form of the two APIs."""

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peagle.engine.params import TokenLogprob
from peagle.server.responses import ChatLogprobs, ContentLogprob, TextLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity
LONE = "\N{REPLACEMENT CHARACTER}".encode()  # replaces bytes that are no character
MAX_SKIPPED = 8  # bytes of tokens that the text may lack before its next character


class Token(ContentLogprob):
    """A token as it is shown. An emitted token has its part of the text, others have their own."""

    id: int
    top_logprobs: list["Token"] = []  # type: ignore[assignment]
    offset: int = 0  # characters of the text before it


class Spelling:
    """Bytes and names of single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokens = tokenizer.backend_tokenizer
        self._added = tokenizer.added_tokens_decoder
        byte_level = "ByteLevel" in repr(self._tokens.decoder)
        letters = bytes_to_unicode() if byte_level else {}
        self._letters = {letter: byte for byte, letter in letters.items()}

    def name(self, token: int) -> str:
        """A token in the middle of a text. Bytes that are no text are named as by OpenAI."""
        spelled = self.spell(token)
        try:
            named = spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        if not named and token in self._added:
            return self._added[token].content
        return named or by_id(token)

    def spell(self, token: int) -> bytes:
        """The bytes of a token; none where it has no text."""
        if token in self._added and self._added[token].special:
            return b""
        piece = self._tokens.id_to_token(token) or ""
        if self._letters.keys() >= set(piece):
            return bytes(map(self._letters.__getitem__, piece))
        if piece.startswith("<0x"):  # Llama 2, Gemma
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


class AnswerLogprobs:
    """Tokens of one answer as its text becomes certain.

    The text is divided among the tokens, so the concatenation of their bytes is its UTF-8: a token
    that is part of a character has its own bytes. Text after a stop string belongs to no token.
    Bytes that are no character are U+FFFD in the text, and in the bytes, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._spelling = Spelling(tokenizer)
        self._waiting = list[tuple[Token, int]]()  # without text yet; end of bytes
        self._bytes = bytearray()  # bytes of all tokens
        self._owners = list[Token]()  # the token of each byte
        self._found = 0  # number of bytes that are in the text, or never will be
        self._characters = 0  # number of characters of the returned tokens

    def push(self, tokens: list[TokenLogprob], text: str, ended: bool) -> list[Token]:
        """Add tokens, and text that is certain; returns the tokens whose text is certain."""
        for token, logprob, top in tokens:
            emitted = self._token(token, logprob)
            emitted.top_logprobs = [
                emitted if id == token else self._token(id, value) for id, value in top
            ]
            self._bytes.extend(emitted.bytes)
            self._owners += [emitted] * len(emitted.bytes)
            self._waiting.append((emitted, len(self._bytes)))
            emitted.bytes = []
        for character in text:
            self._share(character.encode(errors="replace"))
        certain = sum(ended or end <= self._found for _, end in self._waiting)
        ready = [emitted for emitted, _ in self._waiting[:certain]]
        self._waiting = self._waiting[certain:]
        for each in ready:
            begins = [byte & 0xC0 != 0x80 for byte in each.bytes]  # others go on with a character
            each.offset = self._characters - (begins[:1] == [False])
            self._characters += sum(begins)
            if each.bytes and each.token == f" {bytes(each.bytes).decode(errors='replace')}":
                each.token = each.token[1:]  # a text may begin without the space of a word
        return ready

    def _share(self, character: bytes) -> None:
        """Give the bytes of a character to the tokens that have them; to the next token where none
        has."""
        skipped = 0 if character == LONE else MAX_SKIPPED
        at = self._bytes.find(character, self._found, self._found + len(character) + skipped)
        if at < 0:
            rest = self._owners[self._found :][:1] or [self._waiting[-1][0]]
            rest[0].bytes += character
            self._found += character == LONE
            return
        self._found = at + len(character)
        for owner, byte in zip(self._owners[at : self._found], character, strict=True):
            owner.bytes.append(byte)

    def _token(self, id: int, logprob: float) -> Token:
        spelled = list(self._spelling.spell(id))
        logprob = max(logprob, MIN_LOGPROB)
        return Token(id=id, token=self._spelling.name(id), logprob=logprob, bytes=spelled)


def by_id(token: int) -> str:
    """The name of a token without a text of its own, as vLLM writes it."""
    return f"token_id:{token}"


def of_chat(tokens: list[Token]) -> ChatLogprobs | None:
    """A list with one entry per token; None without tokens."""
    return ChatLogprobs(content=[*tokens]) if tokens else None


def of_text(tokens: list[Token]) -> TextLogprobs | None:
    """Parallel lists; None without tokens."""
    if not tokens:
        return None
    return TextLogprobs(
        tokens=[token.token for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_by_name(token) for token in tokens],
        text_offset=[token.offset for token in tokens],
    )


def _by_name(emitted: Token) -> dict[str, float]:
    """Log-probabilities of the most likely tokens and the emitted one. Where several have one name,
    the emitted one keeps it, or else the most likely; the others are named by their ids."""
    names = dict[str, Token]()
    for each in (emitted, *emitted.top_logprobs):
        if names.setdefault(each.token, each) is not each:
            names[by_id(each.id)] = each
    return {name: each.logprob for name, each in names.items()}
