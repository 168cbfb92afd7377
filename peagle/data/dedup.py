"""Decide which new texts to keep: no copies, no near copies, no loops, and a mix of lengths."""

import re
from collections import Counter, defaultdict

SHINGLE = 8  # words
SHARED = 0.8  # of a text's shingles in one earlier text: a near copy
LOOP = 4  # the same four words four times: the writer is stuck
BUCKETS = (16, 32, 64)  # largest token count of each bucket; one more holds longer texts
SHARE = 0.4  # of all kept texts that one bucket may hold
SLACK = 4  # texts, so that the first few are free
PATIENCE = 4  # refusals for length in a row; then any length is welcome


class Kept:
    """The texts kept so far. A text depends on its predecessors only, not on when it came."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._holders: dict[int, list[int]] = defaultdict(list)  # shingle → numbers of the texts
        self._lengths: Counter[int] = Counter()  # by bucket
        self._unwelcome = 0  # refusals for length in a row

    def refuse(self, text: str, tokens: int) -> str | None:
        """Return why a text of `tokens` tokens is refused, in a word or two, or None."""
        words = _words(text)
        if not words:
            return "empty"
        fours = Counter(zip(*(words[i:] for i in range(4)), strict=False))
        if fours and max(fours.values()) >= LOOP:
            return "repetitive"
        if " ".join(words) in self._texts:
            return "duplicate"
        shingles = _shingles(words)
        held = Counter(number for shingle in shingles for number in self._holders.get(shingle, ()))
        if held and max(held.values()) >= SHARED * len(shingles):
            return "near duplicate"
        most = SHARE * self._lengths.total() + SLACK
        if self._lengths[_bucket(tokens)] > most and self._unwelcome < PATIENCE:
            self._unwelcome += 1
            return "length"
        return None

    def add(self, text: str, tokens: int) -> None:
        """Keep a text."""
        words = _words(text)
        for shingle in _shingles(words):
            self._holders[shingle].append(len(self._texts))
        self._texts.add(" ".join(words))
        self._lengths[_bucket(tokens)] += 1
        self._unwelcome = 0


def _words(text: str) -> list[str]:
    """Words without case and punctuation: what texts are compared by."""
    return re.findall(r"\w+", text.casefold())


def _shingles(words: list[str]) -> set[int]:
    """Hashes of all runs of eight words."""
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}


def _bucket(tokens: int) -> int:
    return sum(tokens > most for most in BUCKETS)
