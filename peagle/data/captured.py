"""Captured folders: the target's output for every training document, in shards (data/shard.py).

A folder needs no list of its shards: each one has the numbers of its documents and the count of the
whole capture, so a missing shard is found.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from peagle.data.example import Example, fingerprint
from peagle.data.shard import Origin, Shard
from peagle.errors import InputError
from peagle.model.base_target import BaseTarget, TargetOutput
from peagle.model.fingerprints import config_hash, template_hash, weights_hash

CHANGED = {
    "config_hash": "from another architecture",
    "weights_hash": "from a target with other weights",
    "template_hash": "with another chat template",
    "data": "from other documents",
}


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


def read_shards(folder: Path) -> list[Shard]:
    """Open the shards of a capture, finished or not, in the order of their documents.

    Raises InputError for a shard that cannot be read, or does not belong to the others.
    """
    if (folder / "capture.json").exists():
        again = "capture again, into another folder"
        raise InputError("was captured by an earlier version", value=folder, fix=again)
    shards = [Shard(path) for path in folder.glob("shard-*.safetensors")]
    shards.sort(key=lambda shard: shard.first)
    for shard, following in pairwise(shards):
        how = difference(shard.origin, following.origin)
        if not how and following.first < shard.end:
            how = "it has documents that are in both"
        if how:
            why = f"does not belong to {shard.path.name}: {how}"
            raise InputError(why, value=following.path, fix="keep one capture in a folder")
    return shards


class Captured:
    """The complete capture of a folder. Shards are mapped into memory, never loaded."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError when the folder is no capture, or one that was not finished."""
        self.folder = folder
        self.shards = read_shards(folder)
        if not self.shards:
            raise InputError("a folder without captured shards", field="data", value=folder)
        self.origin = self.shards[0].origin
        self.documents = [
            (shard, number) for shard in self.shards for number in range(shard.end - shard.first)
        ]
        if len(self.documents) < self.origin.documents:
            why = f"{len(self.documents)} of its {self.origin.documents} documents are captured"
            fix = "finish it with the same `peagle data capture`"
            raise InputError(why, field="data", value=folder, fix=fix)

    def check(self, target: BaseTarget, feature_layers: Sequence[int] | None = None) -> None:
        """Raises InputError that names the difference when it is of another target, or has other
        features than the head reads, where these are given."""
        layers = feature_layers or self.origin.feature_layers
        now = replace(self.origin, **target_hashes(target), feature_layers=tuple(layers))
        if how := difference(self.origin, now):
            why = f"{how}; its target was {self.origin.target}"
            fix = "capture it again, or train with the same target, `chat_template` and layers"
            raise InputError(why, field="data", value=self.folder, fix=fix)

    def examples(self) -> list[Example]:
        """Return all documents, without the target's output, whose checksums are left for later.
        Raises InputError when the documents are not those that were captured."""
        try:
            found = [example for shard in self.shards for example in shard.examples()]
            same = fingerprint(found) == self.origin.data
        except (TypeError, ValueError, RuntimeError):  # tensors of another kind or shape
            same = False
        if not same:
            for shard in self.shards:
                shard.verify()  # names the one that is damaged
            raise InputError("documents differ from their recorded fingerprint", value=self.folder)
        return found


class Captures:
    """Documents of several captures of one target, one capture after another. Capturing more text
    adds a folder; the ones before stay as they are."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises InputError as `Captured` does, and for a folder that is named twice."""
        if len({folder.resolve() for folder in folders}) < len(folders):
            fix = "name each once"
            raise InputError("a captured folder is named twice", field="data", fix=fix)
        self.parts = [Captured(folder) for folder in folders]
        self.documents = [document for part in self.parts for document in part.documents]

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
        outputs = [shard.output(number) for shard, number in found]
        hidden = torch.cat([output.hidden for output in outputs])
        features = torch.cat([output.features for output in outputs])
        place = (target.device, target.dtype)
        return TargetOutput(hidden.to(*place), features.to(*place))
