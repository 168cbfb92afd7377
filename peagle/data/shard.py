"""One safetensors file of captured documents, concatenated: `lengths` (D,), `ids` and `supervised`
(N,), `features` (N, F·E) that feed the drafter and `hidden` (N, E) that feeds `Target.logits`.

Shapes: D documents and N tokens of the shard, F feature layers, E target hidden.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.data.example import Example
from peagle.errors import InputError
from peagle.model.base_target import TargetOutput

DTYPE = torch.bfloat16  # of features and hidden states


class Shard(NamedTuple):
    """One file of a capture."""

    file: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


def token_bytes(width: int, layers: int) -> int:
    """Bytes of one token in a shard: id, flag, features and hidden state of E = `width`."""
    return 4 + 1 + width * (layers + 1) * DTYPE.itemsize


def write_shard(path: Path, examples: Sequence[Example], outputs: Iterable[TargetOutput]) -> Shard:
    """Write documents under a temporary name, then rename. Raises OSError, and leaves nothing, when
    the disk refuses."""
    rows = [TargetOutput(*(each.to("cpu", DTYPE) for each in output)) for output in outputs]
    ids = [token for example in examples for token in example.ids]
    supervised = [flag for example in examples for flag in example.supervised]
    tensors = {
        "features": torch.cat([output.features for output in rows]),
        "hidden": torch.cat([output.hidden for output in rows]),
        "ids": torch.tensor(ids, dtype=torch.int32),
        "supervised": torch.tensor(supervised),
        "lengths": torch.tensor([len(example.ids) for example in examples], dtype=torch.int32),
    }
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary)
        temporary.chmod(mode)  # safetensors makes files that nobody else may read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = temporary.stat().st_size
        os.replace(temporary, path)
    except SafetensorError as error:  # what its writer makes of a full disk
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return Shard(path.name, len(examples), len(ids), size, digest)


class OpenShard:
    """A shard's file, mapped into memory: only the rows that are asked for are read."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        """Raises InputError when it cannot be read."""
        self.path = folder / shard.file
        self.shard = shard
        try:
            self.file: Any = safe_open(self.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise self._bad(f"cannot be read ({error})") from error

    @cached_property
    def bounds(self) -> list[int]:
        """Where each document begins, and where the last one ends."""
        return [0, *accumulate(self.rows("lengths").tolist())]

    def examples(self) -> list[Example]:
        """Return the documents, without the target's output."""
        ids = self.rows("ids").tolist()
        supervised = self.rows("supervised").tolist()
        return [Example(ids[a:b], supervised[a:b]) for a, b in pairwise(self.bounds)]

    def output(self, document: int) -> TargetOutput:
        """Return the target's output for a document, in bf16."""
        start, end = self.bounds[document : document + 2]
        return TargetOutput(self.rows("hidden", start, end), self.rows("features", start, end))

    def rows(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Return rows of a tensor as they are stored."""
        try:
            return self.file.get_slice(name)[start:end]
        except SafetensorError as error:
            raise self._bad(f"cannot be read ({error})") from error

    def verify(self) -> None:
        """Raises InputError when the file is not the one that was captured."""
        with self.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.shard.sha256:
                raise self._bad("is damaged (its checksum differs)")

    def _bad(self, why: str) -> InputError:
        again = "delete it and run the same `peagle data capture`, which makes it anew"
        return InputError(f"captured shard {self.path}: {why}: {again}")
