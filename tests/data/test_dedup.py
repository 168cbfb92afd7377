"""Copies, near copies, loops and too much of one length are turned away."""

import pytest

from peagle.data.dedup import FREE, MAX_REFUSALS, MAX_SHARE, Kept

TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
WORDS = TEXT.split()


def kept(*texts: str, tokens: int = 20) -> Kept:
    found = Kept()
    for text in texts:
        found.add(text, tokens)
    return found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TEXT, "duplicate"),
        (TEXT.upper().replace(" ", ",  ") + "?", "duplicate"),
        (TEXT + " fifteen", "near duplicate"),  # 7 of its 8 shingles
        (TEXT + " fifteen sixteen", None),  # 7 of 9
        (" ".join(WORDS[:10]), "near duplicate"),  # all of a shorter text
        (" ".join(WORDS[:7]), None),  # no shingle: only whole texts are compared
        (" ".join(reversed(WORDS)), None),
        ("?! ...", "empty"),
        ("", "empty"),
        ("why " + "I am here now. " * 4, "repetitive"),
        ("why " + "I am here now. " * 3, None),
    ],
)
def test_refusals(text: str, why: str | None) -> None:
    assert kept(TEXT, "something else entirely").refuse(text, 20) == why


def test_shingles_of_two_texts_are_not_added_up() -> None:
    """A text that shares half with each of two others is a copy of neither."""
    other = [word + "s" for word in WORDS]
    mixed = " ".join(WORDS[:12] + other[:12])
    assert kept(TEXT, " ".join(other)).refuse(mixed, 20) is None


def test_no_length_takes_over() -> None:
    """Short texts only: one in five is taken once there are more than their share."""
    found, taken = Kept(), list[bool]()
    for number in range(40):
        why = found.refuse(f"text {number}", 10)
        assert why in (None, "length")
        taken.append(why is None)
        if why is None:
            found.add(f"text {number}", 10)
    free = taken.index(False)
    assert free - 1 <= FREE / (1 - MAX_SHARE) < free
    for attempt, was_taken in enumerate(taken[free:]):
        assert was_taken == (attempt % (MAX_REFUSALS + 1) == MAX_REFUSALS)


def test_other_lengths_are_welcome() -> None:
    found = kept(*(f"text {number}" for number in range(20)), tokens=10)
    assert found.refuse("another", 16) == "length"
    assert [found.refuse("another", tokens) for tokens in (17, 33, 65)] == [None] * 3
