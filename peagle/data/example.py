"""One document to train on."""

from typing import NamedTuple


class Example(NamedTuple):
    """A tokenized document and the tokens the drafter learns to predict."""

    ids: list[int]
    supervised: list[bool]  # the target wrote this token itself
