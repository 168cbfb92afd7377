"""Documents to train on, in files that are mapped into memory: a process holds their places, never
their tokens.

Shapes: D documents and N tokens of a file.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.data.example import Example
from peagle.errors import InputError


class Part:
    """A file of documents, concatenated: `lengths` (D,), `ids` and `supervised` (N,)."""

    fix = "delete its folder, and run the same command again"

    def __init__(self, path: Path) -> None:
        """Raises InputError when the file cannot be read."""
        self.path = path
        self.tensors = dict[str, Tensor]()
        try:
            self.file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise self.bad(f"cannot be read ({error})") from error

    @cached_property
    def bounds(self) -> Tensor:  # (D + 1,)
        """First row of each document, and the number of rows."""
        return F.pad(self.tensor("lengths").long().cumsum(0), (1, 0))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, mapped: its rows are read when they are used. safetensors is asked once,
        as it loses memory whenever it is."""
        if name not in self.tensors:
            try:
                self.tensors[name] = self.file.get_tensor(name)
            except SafetensorError as error:
                raise self.bad(f"cannot be read ({error})") from error
        return self.tensors[name]

    def example(self, document: int) -> Example:
        """Return a document, counted from 0 in the file."""
        rows = slice(*self.bounds[document : document + 2].tolist())
        return Example(self.tensor("ids")[rows].tolist(), self.tensor("supervised")[rows].tolist())

    def bad(self, why: str) -> InputError:
        """The error of a file that cannot be used."""
        return InputError(why, value=self.path, fix=self.fix)


P = TypeVar("P", bound=Part)


class Documents(Sequence[Example], Generic[P]):
    """Documents of several files, one file after another; each is read when it is asked for."""

    def __init__(self, parts: Sequence[P]) -> None:
        self.parts = parts
        self.firsts = [0, *accumulate(map(len, parts))]  # number of each file's first document
        self.chosen: Sequence[int] = range(self.firsts[-1])

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> Example:  # type: ignore[override]
        part, document = self.find(number)
        return part.example(document)

    def find(self, number: int) -> tuple[P, int]:
        """Return the file of a document, and its number there."""
        number = self.chosen[number]
        part = bisect_right(self.firsts, number) - 1
        return self.parts[part], number - self.firsts[part]

    def only(self, numbers: Sequence[int]) -> Self:
        """Some of the documents, in that order."""
        made = copy(self)
        made.chosen = array("q", (self.chosen[number] for number in numbers))
        return made


def tensors_of(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Return the tensors of a file of documents."""
    ids = [token for example in examples for token in example.ids]
    supervised = [flag for example in examples for flag in example.supervised]
    return {
        "ids": torch.tensor(ids, dtype=torch.int32),
        "supervised": torch.tensor(supervised, dtype=torch.bool),
        "lengths": torch.tensor([len(example.ids) for example in examples], dtype=torch.int32),
    }
