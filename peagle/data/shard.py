"""One safetensors file of captured documents, one behind the other: `lengths` (D,), `ids` and
`supervised` (N,), `features` (N, F·E) that feed the drafter, `hidden` (N, E) that feeds
`Target.logits`; in fp8 the last two with a scale a row, `features_scale` and `hidden_scale` (N,).

Shapes: D documents and N tokens of the shard, F feature layers, E target hidden, W a row's width.
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
from peagle.model.target import TargetOutput

DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
FP8_MAX = 448.0  # largest finite float8_e4m3fn


class Shard(NamedTuple):
    """One file of a capture."""

    file: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


class Row8(NamedTuple):
    """Rows as float8_e4m3fn (N, W) and what to multiply each with, float32 (N,)."""

    values: Tensor
    scale: Tensor


def to_fp8(rows: Tensor) -> Row8:
    """Rows (N, W), each scaled so that its largest magnitude is FP8_MAX, to the nearest float8.

    A value x of a row with scale s comes back within max(|x| / 16, s / 1024): half a unit of the
    last of three mantissa bits, or of the smallest subnormal.
    """
    rows = rows.float()
    scale = (rows.abs().amax(-1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (rows / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)  # beyond it a float8 would be NaN
    return Row8(scaled.to(torch.float8_e4m3fn), scale)


def from_fp8(rows: Row8) -> Tensor:
    """float32 (N, W)."""
    return rows.values.float() * rows.scale[:, None]


def token_bytes(width: int, layers: int, dtype: str) -> int:
    """Bytes of one token in a shard: id, flag, features and hidden state of E = `width`."""
    scales = 8 if dtype == "fp8" else 0
    return 4 + 1 + width * (layers + 1) * DTYPES[dtype].itemsize + scales


def write_shard(
    path: Path, examples: Sequence[Example], outputs: Iterable[TargetOutput], dtype: str
) -> Shard:
    """Write documents under a temporary name, then rename. Raises OSError, and leaves nothing, when
    the disk refuses."""
    parts: dict[str, list[Tensor]] = {}
    for said in outputs:
        for name, rows in (("features", said.features), ("hidden", said.hidden)):
            for key, tensor in _stored(name, rows, dtype).items():
                parts.setdefault(key, []).append(tensor)
    tensors = {name: torch.cat(parts.pop(name)) for name in list(parts)}
    tensors["ids"] = torch.tensor([i for e in examples for i in e.ids], dtype=torch.int32)
    tensors["supervised"] = torch.tensor([flag for e in examples for flag in e.supervised])
    tensors["lengths"] = torch.tensor([len(e.ids) for e in examples], dtype=torch.int32)
    made = path.with_name(f".{path.name}")
    try:
        made.touch()
        mode = made.stat().st_mode
        save_file(tensors, made)
        made.chmod(mode)  # safetensors makes files that nobody else may read
        with made.open("rb+") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = made.stat().st_size
        os.replace(made, path)
    except SafetensorError as error:  # what its writer makes of a full disk
        raise OSError(str(error)) from error
    finally:
        made.unlink(missing_ok=True)
    return Shard(path.name, len(examples), len(tensors["ids"]), size, digest)


def _stored(name: str, rows: Tensor, dtype: str) -> dict[str, Tensor]:
    """Rows of a document as a shard holds them, on the CPU."""
    if dtype == "bfloat16":
        return {name: rows.to("cpu", torch.bfloat16)}
    values, scale = to_fp8(rows)
    return {name: values.cpu(), f"{name}_scale": scale.cpu()}


class OpenShard:
    """A shard's file, mapped into memory: only the rows that are asked for are read."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        """Raises InputError when it cannot be read."""
        self.path, self.shard = folder / shard.file, shard
        try:
            self.file: Any = safe_open(self.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(self._bad(f"cannot be read ({error})")) from error

    @cached_property
    def ends(self) -> list[int]:
        """Where each document ends."""
        return list(accumulate(self.rows("lengths").tolist()))

    def examples(self) -> list[Example]:
        """Its documents, without what the target made of them."""
        ids, said = self.rows("ids").tolist(), self.rows("supervised").tolist()
        return [Example(ids[a:b], said[a:b]) for a, b in pairwise([0, *self.ends])]

    def output(self, place: int) -> TargetOutput:
        """What the target made of the document at `place`."""
        start, end = [0, *self.ends][place : place + 2]
        return TargetOutput(
            self._values("hidden", start, end), self._values("features", start, end)
        )

    def rows(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Rows of a tensor as they are stored."""
        try:
            return self.file.get_slice(name)[start:end]
        except SafetensorError as error:
            raise InputError(self._bad(f"cannot be read ({error})")) from error

    def _values(self, name: str, start: int, end: int) -> Tensor:
        """Rows of features or hidden states, float32 or bfloat16."""
        rows = self.rows(name, start, end)
        if rows.dtype != torch.float8_e4m3fn:
            return rows
        return from_fp8(Row8(rows, self.rows(f"{name}_scale", start, end)))

    def verify(self) -> None:
        """Raises InputError when the file is not the one that was captured."""
        with self.path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.shard.sha256:
                raise InputError(self._bad("is damaged (its checksum differs)"))

    def _bad(self, why: str) -> str:
        again = "delete it and run the same `peagle data capture`, which makes it anew"
        return f"captured shard {self.path}: {why}: {again}"
