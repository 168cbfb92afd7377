"""Captures: the target's output for every training document, in shards (data/shard.py).

The shards of a capture may lie in several folders, as its parts were made. A folder needs no list
of them: each one has the numbers of its documents and the count of the whole capture, so a missing
shard is found.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

from peagle.data.documents import Documents
from peagle.data.example import fingerprint
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
    return _in_order([Shard(path) for path in folder.glob("shard-*.safetensors")])


def _in_order(shards: list[Shard]) -> list[Shard]:
    shards.sort(key=lambda shard: (shard.first, shard.path))
    for shard, following in pairwise(shards):
        if how := difference(shard.origin, following.origin):
            raise _stray(following, shard, how)
        if following.first < shard.end:
            raise _stray(following, shard, "both have the same documents")
    return shards


def _stray(shard: Shard, other: Shard, how: str) -> InputError:
    fix = "keep one capture in a folder, and the `part` n of all its parts"
    return InputError(f"does not belong to {other.path}: {how}", value=shard.path, fix=fix)


class Captures(Documents[Shard]):
    """Documents of captures of one target, one capture after another, with the target's output.
    Capturing more text adds a folder; the ones before stay as they are."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises InputError when a folder is no capture or is named twice, a part of a capture is
        missing, or a shard is damaged."""
        if len({folder.resolve() for folder in folders}) < len(folders):
            fix = "name each once"
            raise InputError("a captured folder is named twice", field="data", fix=fix)
        found: dict[Origin, list[Shard]] = {}  # of each capture
        for folder in folders:
            shards = read_shards(folder)
            if not shards:
                raise InputError("a folder without captured shards", field="data", value=folder)
            origin = shards[0].origin
            same = (known for known in found if not difference(known, origin))
            found.setdefault(next(same, origin), []).extend(shards)
        self.captures = [_in_order(shards) for shards in found.values()]
        lacking = [shards for shards in self.captures if _gap(shards)]
        if len(lacking) > 1:  # parts of one capture are meant
            first, other = lacking[0][0], lacking[1][0]
            raise _stray(other, first, difference(first.origin, other.origin))
        if lacking:
            count = lacking[0][0].origin.documents
            why = f"{_gap(lacking[0])} of {count} are missing"
            fix = "name all its parts, or finish it with the same `peagle data capture`"
            raise InputError(why, field="data", value=lacking[0][0].path.parent, fix=fix)
        super().__init__([shard for shards in self.captures for shard in shards])

    def check(self, target: BaseTarget, feature_layers: Sequence[int] | None = None) -> None:
        """Raises InputError for the first capture that is of another target, or has other features
        than the head reads, where these are given."""
        for shard in (shards[0] for shards in self.captures):
            layers = tuple(feature_layers or shard.origin.feature_layers)
            now = replace(shard.origin, **target_hashes(target), feature_layers=layers)
            if how := difference(shard.origin, now):
                why = f"{how}; its target was {shard.origin.target}"
                fix = "capture it again, or train with the same target, `chat_template` and layers"
                raise InputError(why, field="data", value=shard.path.parent, fix=fix)

    def verify(self) -> None:
        """Raises InputError when the documents are not those that were captured. The checksums of
        the target's output are left for later."""
        for shards in self.captures:
            try:
                found = fingerprint(chain.from_iterable(shard.examples() for shard in shards))
            except (TypeError, ValueError, RuntimeError):  # tensors of another kind or shape
                found = ""
            if found != shards[0].origin.data:
                for shard in shards:
                    shard.verify()  # names the one that is damaged
                folder = shards[0].path.parent
                raise InputError("documents differ from their recorded fingerprint", value=folder)

    def output(self, documents: Sequence[int], target: BaseTarget) -> TargetOutput:
        """Return the output of `target` for documents, concatenated, in its dtype and device."""
        outputs = [shard.output(number) for shard, number in map(self.find, documents)]
        hidden = torch.cat([output.hidden for output in outputs])
        features = torch.cat([output.features for output in outputs])
        place = (target.device, target.dtype)
        return TargetOutput(hidden.to(*place), features.to(*place))


def _gap(shards: Sequence[Shard]) -> str:
    """The first documents that are missing, as "4 to 9"; empty when there are none."""
    ends = [0, *(shard.end for shard in shards)]
    following = [*(shard.first for shard in shards), shards[0].origin.documents]
    for end, first in zip(ends, following, strict=True):
        if first > end:
            return f"documents {end + 1} to {first}"
    return ""
