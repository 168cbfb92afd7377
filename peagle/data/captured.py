"""A captured folder: the target's output for every training document, in safetensors shards.

`capture.json` records what the shards (data/shard.py) were made from, and lists the complete ones.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import torch

from peagle.data.example import Example, fingerprint
from peagle.data.shard import DTYPE, OpenShard, Shard
from peagle.errors import InputError, first_line
from peagle.files import replace_file
from peagle.model.base_target import BaseTarget, TargetOutput
from peagle.model.fingerprints import config_hash, template_hash, weights_hash

MANIFEST = "capture.json"
FORMAT = 1
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
CHANGED = {
    "config_hash": "from another architecture",
    "weights_hash": "from a target with other weights",
    "template_hash": "with another chat template",
    "data": "from other documents",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a capture was made from; all but `target` must be the same to continue it."""

    target: str  # name the user gave
    config_hash: str  # of the target's architecture (model/target.py)
    weights_hash: str  # of a few of its weights
    template_hash: str  # of its chat template
    feature_layers: tuple[int, ...]
    max_length: int  # tokens a document was cut to
    shard_bytes: int  # a shard is as many whole documents as fit into these, at least one
    data: str  # sha256 of all ids and of what is supervised
    documents: int  # in the whole capture


class Manifest(NamedTuple):
    """`capture.json`."""

    origin: Origin
    shards: tuple[Shard, ...]  # those that are whole, in the order of their documents


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace `capture.json` in one go."""
    shards = [shard._asdict() for shard in manifest.shards]
    origin = asdict(manifest.origin)
    record = {"format": FORMAT, "dtype": DTYPE_NAME, **origin, "shards": shards}
    replace_file(folder / MANIFEST, json.dumps(record, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read `capture.json` of a folder. Raises InputError when it cannot be read."""
    file = folder / MANIFEST
    if not file.is_file():
        raise InputError(f"{folder}: a folder without {MANIFEST}: not a capture")
    try:
        record = json.loads(file.read_text())
        if record["format"] != FORMAT:
            raise InputError(f"{file}: format {record['format']}, this version reads {FORMAT}")
        if record["dtype"] != DTYPE_NAME:
            why = f"this version reads {DTYPE_NAME}: capture it again into another folder"
            raise InputError(f"{file}: dtype {record['dtype']}, {why}")
        given = {field.name: record[field.name] for field in fields(Origin)}
        given["feature_layers"] = tuple(map(index, given["feature_layers"]))
        shards = tuple(Shard(**shard) for shard in record["shards"])
        if any(Path(shard.file).name != shard.file or shard.documents < 1 for shard in shards):
            raise ValueError("a shard that cannot be")
        return Manifest(Origin(**given), shards)
    except InputError:
        raise
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        why = f"not what `peagle data capture` writes ({type(error).__name__}: {first_line(error)})"
        raise InputError(f"{file}: {why}") from error


def target_hashes(target: BaseTarget) -> dict[str, Any]:
    """Return the fields of `Origin` that identify a target."""
    return {
        "config_hash": config_hash(target),
        "weights_hash": weights_hash(target),
        "template_hash": template_hash(target),
    }


def difference(was: Origin, now: Origin) -> str:
    """Name the first difference between two captures; empty when there is none. The target's name
    may differ: it may be a folder that was moved."""
    old_fields = asdict(replace(was, target=now.target))
    for name, new in asdict(now).items():
        old = old_fields[name]
        if old != new and name in CHANGED:
            return f"captured {CHANGED[name]} ({name} {old[:16]}, now {new[:16]})"
        if old != new:
            return f"captured with {name.replace('_', ' ')} {old}, now {new}"
    return ""


class Captured:
    """Reads a complete capture, the rows of a few documents at a time: shards are mapped into
    memory, never loaded. Documents are counted from 0, in the order they were captured."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError when the folder is no capture, or one that was not finished."""
        self.folder = folder
        self.origin, self.shards = read_manifest(folder)
        self._ends = list(accumulate(shard.documents for shard in self.shards))
        done = self._ends[-1] if self._ends else 0
        if done != self.origin.documents:
            why = f"{done} of its {self.origin.documents} documents are captured"
            raise InputError(f"{folder}: {why}: finish it with the same `peagle data capture`")
        self._open: dict[int, OpenShard] = {}

    def check(self, target: BaseTarget, feature_layers: Sequence[int] | None = None) -> None:
        """Raises InputError that names the difference when it is of another target, or has other
        features than the head reads, where these are given."""
        if how := difference(self.origin, replace(self.origin, **target_hashes(target))):
            again = "capture it again"
            if CHANGED["template_hash"] in how:
                again += ", or name that template with `chat_template`"
            names = f"target {self.origin.target}, now {target.name}"
            raise InputError(f"{self.folder}: {how}, {names}: {again}")
        if feature_layers is not None and self.origin.feature_layers != tuple(feature_layers):
            both = self.origin.feature_layers, feature_layers
            was, has = (",".join(map(str, layers)) for layers in both)
            raise InputError(
                f"{self.folder}: captured with feature layers {was}, the head has {has}: "
                "capture it again, or make a head of those"
            )

    def examples(self) -> list[Example]:
        """Return all documents, without the target's output, whose checksums are left for later.
        Raises InputError when the documents are not those that were captured."""
        parts = [OpenShard(self.folder, shard) for shard in self.shards]
        try:
            found = [example for part in parts for example in part.examples()]
            same = fingerprint(found) == self.origin.data
        except (TypeError, ValueError, RuntimeError):  # tensors of another kind or shape
            same = False
        if not same:
            for part in parts:
                part.verify()  # names the one that is damaged
            raise InputError(f"{self.folder}: holds other documents than {MANIFEST} says")
        return found

    def output(self, documents: Sequence[int], target: BaseTarget) -> TargetOutput:
        """Return the output of `target` for documents, concatenated, in its dtype and device.

        The checksum of each shard is verified when the first of its documents is asked for.
        """
        parts = [self._document(number) for number in documents]
        hidden = torch.cat([part.hidden for part in parts])
        features = torch.cat([part.features for part in parts])
        return TargetOutput(
            hidden.to(target.device, target.dtype), features.to(target.device, target.dtype)
        )

    def _document(self, number: int) -> TargetOutput:
        index = bisect_right(self._ends, number)
        if index not in self._open:
            shard = OpenShard(self.folder, self.shards[index])
            shard.verify()
            self._open[index] = shard
        first = self._ends[index] - self.shards[index].documents
        return self._open[index].output(number - first)


class Captures:
    """Documents of several captures of one target, one capture after another. Capturing more text
    adds a folder; the ones before stay as they are."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises InputError as `Captured` does, and for a folder that is named twice."""
        if len({folder.resolve() for folder in folders}) < len(folders):
            raise InputError("data: a captured folder is named twice: name each once")
        self.parts = [Captured(folder) for folder in folders]
        self.documents = [
            (part, number) for part in self.parts for number in range(part.origin.documents)
        ]

    def only(self, documents: Sequence[int]) -> "Captures":
        """Some of the documents, in that order."""
        chosen = copy(self)
        chosen.documents = [self.documents[number] for number in documents]
        return chosen

    def check(self, target: BaseTarget, feature_layers: Sequence[int] | None = None) -> None:
        """Raises InputError as `Captured.check` does, for the first folder that differs."""
        for part in self.parts:
            part.check(target, feature_layers)

    def examples(self) -> list[Example]:
        """Return the documents of all folders, as `Captured.examples` does."""
        return [example for part in self.parts for example in part.examples()]

    def output(self, documents: Sequence[int], target: BaseTarget) -> TargetOutput:
        """Return the output of `target` for documents, concatenated, in its dtype and device."""
        found = [self.documents[number] for number in documents]
        outputs = [part.output([number], target) for part, number in found]
        return TargetOutput(*(torch.cat(each) for each in zip(*outputs, strict=True)))
