"""Refuses copies, near copies and loops among new texts, and too many of one length."""

import re
from bisect import bisect_left
from collections import Counter, defaultdict

SHINGLE = 8  # words
MAX_SHARED = 0.8  # share of a text's shingles in one earlier text; more is a near copy
MAX_REPEATS = 4  # of the same four words; the writer is stuck in a loop
BUCKETS = (16, 32, 64)  # largest token count of each bucket; one more holds longer texts
MAX_SHARE = 0.4  # share of the kept texts in one bucket
FREE = 4  # texts of any length at the beginning
MAX_REFUSALS = 4  # for length in a row; after these any length is accepted


class Kept:
    """The texts kept so far. A text depends on its predecessors only, not on when it came."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._holders: dict[int, list[int]] = defaultdict(list)  # shingle → numbers of the texts
        self._lengths: Counter[int] = Counter()  # by bucket
        self._refusals = 0  # for length in a row

    def refuse(self, text: str, tokens: int) -> str | None:
        """Return the reason, in a word or two, if a text of `tokens` tokens is refused."""
        words = _words(text)
        if not words:
            return "empty"
        fours = Counter(zip(*(words[i:] for i in range(4)), strict=False))
        if fours and max(fours.values()) >= MAX_REPEATS:
            return "repetitive"
        if " ".join(words) in self._texts:
            return "duplicate"
        shingles = _shingles(words)
        held = Counter(number for shingle in shingles for number in self._holders.get(shingle, ()))
        if held and max(held.values()) >= MAX_SHARED * len(shingles):
            return "near duplicate"
        allowed = MAX_SHARE * self._lengths.total() + FREE
        of_this_length = self._lengths[bisect_left(BUCKETS, tokens)]
        if of_this_length > allowed and self._refusals < MAX_REFUSALS:
            self._refusals += 1
            return "length"
        return None

    def add(self, text: str, tokens: int) -> None:
        """Keep a text."""
        words = _words(text)
        for shingle in _shingles(words):
            self._holders[shingle].append(len(self._texts))
        self._texts.add(" ".join(words))
        self._lengths[bisect_left(BUCKETS, tokens)] += 1
        self._refusals = 0


def _words(text: str) -> list[str]:
    """Words without case and punctuation, by which texts are compared."""
    return re.findall(r"\w+", text.casefold())


def _shingles(words: list[str]) -> set[int]:
    """Hashes of all runs of eight words."""
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}
