"""Lookup: the tokens that followed an earlier occurrence of a request's newest tokens.

Code, edits and extraction repeat their own context, so this is a draft that costs nothing to make.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

from peagle.engine.tree import Candidate, Draft, Match, Offer, Path

SIZES = (4, 3, 2)  # lengths of n-grams, the longest first
AT_FIRST = (4.0, 2.0)  # tried and accepted tokens that are assumed before any is counted
FORGET = 0.98  # weight that earlier tokens keep, a token: texts differ


class Index:
    """The last occurrence of each n-gram of a request's tokens. It grows with the request."""

    def __init__(self) -> None:
        self._next = dict[tuple[int, ...], int]()  # index after the n-gram's last occurrence
        self._known = 0  # tokens indexed so far

    def find(self, tokens: Sequence[int], max_tokens: int) -> Match:
        """The tokens that followed the longest n-gram that ends `tokens`, at most `max_tokens`."""
        for end in range(self._known, len(tokens)):
            for size in SIZES:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)
        for size in SIZES:
            at = self._next.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if at is not None:
                return Match(size, tuple(tokens[at : at + max_tokens]))
        return Match()


class LookupCalibration:
    """The chance that a looked-up token is accepted where the one before it was, by the size of the
    match and the depth."""

    def __init__(self) -> None:
        # By size and depth: tokens that were tried, and tokens that were accepted.
        self._counts = dict[tuple[int, int], tuple[float, float]]()

    def __call__(self, size: int, depth: int) -> float:
        tried, accepted = self._counts.get((size, depth), AT_FIRST)
        return accepted / tried

    def along(self, match: Match) -> list[float]:
        """The chances that a match is accepted up to each of its tokens."""
        chances = [self(match.size, depth) for depth in range(len(match.tokens))]
        return list(accumulate(chances, mul))

    def count(self, draft: Draft, path: Sequence[int]) -> None:
        """A draft was verified and its rows `path` accepted."""
        for depth, row in enumerate(draft.follow(draft.match.tokens)):
            place = (draft.match.size, depth)
            tried, accepted = self._counts.get(place, AT_FIRST)
            self._counts[place] = (tried * FORGET + 1, accepted * FORGET + (row in path))
            if row not in path:
                break


def with_lookup(offer: Offer, match: Match, chance: LookupCalibration) -> Offer:
    """The candidates after a path, with the looked-up token. A token that both know has the larger
    of its chances; the others' are scaled to what is left."""

    def merged(path: Path) -> Iterable[Candidate]:
        depth = len(path)
        if match.tokens[:depth] != path or depth == len(match.tokens):
            return offer(path)
        offered = list(offer(path))
        token = match.tokens[depth]
        same = [each for each in offered if each.token == token]
        others = [each for each in offered if each.token != token]
        found = Candidate(token, 0.0, chance(match.size, depth))
        if same:
            found = max(same[0], found._replace(prob=same[0].prob), key=lambda each: each.chance)
        left = sum(each.chance for each in others)
        share = min(1.0, (1 - found.chance) / left) if left else 1.0
        scaled = [each._replace(chance=each.chance * share) for each in others]
        return sorted([found, *scaled], key=lambda each: -each.chance)

    return merged
