"""Captures: the target's output for every training document, in shards.

A shard is one safetensors file of documents, concatenated: `lengths` (D,), `ids` and `supervised`
(N,), `features` (N, F·E) that feed the drafter and `hidden` (N, E) that feeds `Target.logits`. Its
header records the capture that it belongs to, its documents, and a checksum.

The shards of a capture may lie in several folders, as its parts were made. A folder needs no list
of them: each one has the numbers of its documents and the count of the whole capture, so a missing
shard is found.

Shapes: D documents and N tokens of the shard, F feature layers, E target hidden.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.data.documents import Documents, Part, tensors_of
from peagle.data.example import Examples, fingerprint
from peagle.errors import InputError
from peagle.files import replacing
from peagle.model.base_target import BaseTarget, TargetOutput
from peagle.model.fingerprints import config_hash, template_hash, weights_hash

DTYPE = torch.bfloat16  # features and hidden states
KEY = "peagle.capture.2"  # metadata of the header; another format has another key
TENSORS = ("features", "hidden", "ids", "lengths", "supervised")
CHANGED = {
    "config_hash": "from another architecture",
    "weights_hash": "from a target with other weights",
    "template_hash": "with another chat template",
    "data": "from other documents",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The source and the settings of a whole capture; to continue it, all but `target` must agree.

    target: Name that the user gave: a folder may be moved.
    config_hash, weights_hash, template_hash: Hashes of the target (model/fingerprints.py).
    max_length: Tokens that a document was cut to.
    shard_bytes: Size of a shard, which holds whole documents, at least one.
    data: sha256 of all documents.
    documents: Count of documents in the whole capture.
    """

    target: str = field(compare=False)
    config_hash: str
    weights_hash: str
    template_hash: str
    feature_layers: tuple[int, ...]
    max_length: int
    shard_bytes: int
    data: str
    documents: int


def token_bytes(width: int, layers: int) -> int:
    """Bytes of one token in a shard: id, flag, features and hidden state of E = `width`."""
    return 4 + 1 + width * (layers + 1) * DTYPE.itemsize


def write_shard(
    path: Path, origin: Origin, first: int, examples: Examples, outputs: Iterable[TargetOutput]
) -> None:
    """Write documents to a file, whole or not at all; `first`: number of the first one in the
    capture. Raises OSError when the disk refuses."""
    # Moved one by one: together they may not fit next to the target.
    moved = [TargetOutput(o.hidden.to("cpu", DTYPE), o.features.to("cpu", DTYPE)) for o in outputs]
    tensors = tensors_of(examples) | _joined(moved)._asdict()
    end = first + len(examples)
    facts = {"origin": asdict(origin), "first": first, "end": end, "sha256": _checksum(tensors)}
    text = json.dumps(facts)
    with replacing(path) as made:
        made.touch()
        mode = made.stat().st_mode
        save_file(tensors, made, {KEY: f"{_sha256(text)} {text}"})
        made.chmod(mode)  # safetensors makes files that only their owner may read


class Shard(Part):
    """A shard's file, mapped into memory: only the requested rows are read."""

    fix = "delete it and run the same `peagle data capture`, which makes it anew"

    def __init__(self, path: Path) -> None:
        """Raises InputError when the file or its header cannot be read."""
        super().__init__(path)
        checksum, _, text = (self.file.metadata() or {}).get(KEY, "").partition(" ")
        if checksum != _sha256(text):
            raise self.bad("its header is damaged, or of another version")
        facts = json.loads(text)
        origin = facts["origin"]
        self.origin = Origin(**{**origin, "feature_layers": tuple(origin["feature_layers"])})
        self.first: int = facts["first"]  # number of its first document in the capture
        self.end: int = facts["end"]  # number after its last one
        self.sha256 = facts["sha256"]
        self._verified = False

    def __len__(self) -> int:
        return self.end - self.first

    def output(self, document: int) -> TargetOutput:
        """Return the target's output for a document of the shard, counted from 0, in bf16. Raises
        InputError, the first time, when the file is damaged."""
        if not self._verified:
            self.verify()
        rows = slice(*self.bounds[document : document + 2].tolist())
        return TargetOutput(self.tensor("hidden")[rows], self.tensor("features")[rows])

    def verify(self) -> None:
        """Raises InputError when the tensors are not those that were captured."""
        if _checksum({name: self.tensor(name) for name in TENSORS}) != self.sha256:
            raise self.bad("is damaged (its checksum differs)")
        self._verified = True


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def target_hashes(target: BaseTarget) -> dict[str, Any]:
    """Return the fields of `Origin` that identify a target."""
    return {each.__name__: each(target) for each in (config_hash, weights_hash, template_hash)}


def difference(was: Origin, now: Origin) -> str:
    """Name the first difference between two captures; empty when there is none."""
    old_fields = asdict(replace(was, target=now.target))
    for name, new in asdict(now).items():
        old = old_fields[name]
        if old != new and name in CHANGED:
            hashes = f"{old[:16] or 'none'}, now {new[:16] or 'none'}"
            return f"captured {CHANGED[name]} ({name} {hashes})"
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
            raise InputError("a captured folder is named twice", field="data", fix="name each once")
        found = defaultdict[Origin, list[Shard]](list)  # of each capture
        for folder in folders:
            shards = read_shards(folder)
            if not shards:
                fix = "give either files or captured folders"
                raise InputError("no captured shards there", field="data", value=folder, fix=fix)
            found[shards[0].origin] += shards
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
                found = fingerprint(Documents(shards))
            except (TypeError, ValueError, RuntimeError):  # tensors of another kind or shape
                found = ""
            if found != shards[0].origin.data:
                for shard in shards:
                    shard.verify()  # names the one that is damaged
                folder = shards[0].path.parent
                raise InputError("documents differ from their recorded fingerprint", value=folder)

    def output(self, documents: Sequence[int], target: BaseTarget) -> TargetOutput:
        """Return the output of `target` for documents, concatenated, in its dtype and device."""
        found = _joined([shard.output(number) for shard, number in map(self.find, documents)])
        place = (target.device, target.dtype)
        return TargetOutput(found.hidden.to(*place), found.features.to(*place))


def _joined(outputs: Sequence[TargetOutput]) -> TargetOutput:
    """The output for documents, concatenated."""
    hidden, features = zip(*outputs, strict=True)
    return TargetOutput(torch.cat(hidden), torch.cat(features))


def _gap(shards: Sequence[Shard]) -> str:
    """The first documents that are missing, as "4 to 9"; empty when there are none."""
    ends = [0, *(shard.end for shard in shards)]
    following = [*(shard.first for shard in shards), shards[0].origin.documents]
    for end, first in zip(ends, following, strict=True):
        if first > end:
            return f"documents {end + 1} to {first}"
    return ""
