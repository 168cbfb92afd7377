"""Copies, near copies and loops are turned away."""

import pytest

from peagle.data.synth import Kept

TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
WORDS = TEXT.split()


def kept(*texts: str) -> Kept:
    found = Kept()
    for text in texts:
        found.add(text)
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
    assert kept(TEXT, "something else entirely").refuse(text) == why


def test_shingles_of_two_texts_are_not_added_up() -> None:
    """A text that shares half with each of two others is a copy of neither."""
    other = [word + "s" for word in WORDS]
    mixed = " ".join(WORDS[:12] + other[:12])
    assert kept(TEXT, " ".join(other)).refuse(mixed) is None
