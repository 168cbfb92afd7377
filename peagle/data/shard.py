"""One safetensors file of captured documents, concatenated: `lengths` (D,), `ids` and `supervised`
(N,), `features` (N, F·E) that feed the drafter and `hidden` (N, E) that feeds `Target.logits`.

The file's header records the capture that it belongs to, its documents, and a checksum.

Shapes: D documents and N tokens of the shard, F feature layers, E target hidden.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.data.documents import Part, tensors_of
from peagle.data.example import Example
from peagle.files import replacing
from peagle.model.base_target import TargetOutput

DTYPE = torch.bfloat16  # features and hidden states
KEY = "peagle.capture.2"  # metadata of the header; another format has another key
TENSORS = ("features", "hidden", "ids", "lengths", "supervised")


@dataclass(frozen=True, slots=True)
class Origin:
    """The source and the settings of a whole capture; to continue it, all but `target` must agree.

    target: Name that the user gave.
    config_hash, weights_hash, template_hash: Hashes of the target (model/fingerprints.py).
    max_length: Tokens that a document was cut to.
    shard_bytes: Size of a shard, which holds whole documents, at least one.
    data: sha256 of all documents.
    documents: Count of documents in the whole capture.
    """

    target: str
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
    path: Path,
    origin: Origin,
    first: int,  # number of the first document in the capture
    examples: Sequence[Example],
    outputs: Iterable[TargetOutput],
) -> None:
    """Write documents to a file, whole or not at all. Raises OSError when the disk refuses."""
    features: list[Tensor] = []
    hidden: list[Tensor] = []
    for output in outputs:  # moved one by one: together they may not fit next to the target
        features.append(output.features.to("cpu", DTYPE))
        hidden.append(output.hidden.to("cpu", DTYPE))
    tensors = tensors_of(examples)
    tensors |= {"features": torch.cat(features), "hidden": torch.cat(hidden)}
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
