"""One document to train on."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Example(NamedTuple):
    """A tokenized document and the tokens the drafter learns to predict."""

    ids: list[int]
    supervised: list[bool]  # the target wrote this token itself


Examples = Sequence[Example]  # lists, or documents of files (data/documents.py)


def fingerprint(examples: Iterable[Example]) -> str:
    """sha256 of documents."""
    digest = hashlib.sha256()
    for ids, supervised in examples:
        digest.update(torch.tensor([len(ids), *ids]).numpy().tobytes() + bytes(supervised))
    return digest.hexdigest()
