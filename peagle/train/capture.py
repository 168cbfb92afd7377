"""The target over every training document once, kept on disk: training then never runs it again.

The documents of a shard depend on their lengths alone, and a shard counts once the manifest lists
it: a capture that was killed continues at the first shard that is missing. What runs the target,
this process or vLLM (vllm/capture.py), is not recorded: they differ by rounding, as devices and
dtypes do, and one may finish what the other began.
"""

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from peagle.data.captured import (
    MANIFEST,
    Manifest,
    Origin,
    difference,
    read_manifest,
    target_hashes,
    write_manifest,
)
from peagle.data.example import Example, fingerprint
from peagle.data.shard import Shard, token_bytes, write_shard
from peagle.errors import InputError
from peagle.model.config import default_feature_layers
from peagle.model.target import Target, TargetOutput
from peagle.train.batches import Sequence
from peagle.train.target_pass import run_target

HEADER = 1024  # bytes of a shard besides its tokens and documents, at most
# The target over documents' token ids, in their order.
Run = Callable[[list[list[int]]], Generator[TargetOutput]]


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """What is captured, and into files of what size.

    output: Folder for the shards; documents that it holds are not captured again.
    feature_layers: Target layers whose inputs are captured, as 2,15,27; the number of layers is
        what leaves the last one. Default: 2, n/2 and n - 3 of n layers.
    max_length: Maximum length of a document in tokens, less than the target's context; the rest is
        cut.
    shard_bytes: Size of one shard file in bytes.
    """

    output: Path
    feature_layers: tuple[int, ...] | None = None
    max_length: int = 1024
    shard_bytes: int = 512_000_000

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise InputError(f"shard size {self.shard_bytes}: must be above 0 bytes")


class Plan(NamedTuple):
    """What is to be captured. Bytes are what the files take on disk."""

    origin: Origin
    shards: list[range]  # documents of each
    done: dict[int, Shard]  # by number, those that a former run left whole
    tokens: int
    bytes: int
    bytes_left: int  # without those that are done


def plan_capture(
    target: Target, examples: list[Example], config: CaptureConfig, *, passing: int = 0
) -> Plan:
    """Find what a capture of `examples` into `config.output` has still to do; at most `passing`
    tokens of the target's output lie beside the shards meanwhile.

    Raises InputError when another capture is there, or the disk has too little room.
    """
    layers = config.feature_layers or default_feature_layers(len(target.layers))
    if list(layers) != sorted(set(layers)):
        why = "must be strictly ascending (a target of fewer than 7 layers has no defaults)"
        raise InputError(f"feature layers {list(layers)}: {why}: name others")
    target.check_layers(layers)
    origin = Origin(
        target=target.name,
        **target_hashes(target),
        feature_layers=tuple(layers),
        max_length=config.max_length,
        shard_bytes=config.shard_bytes,
        data=fingerprint(examples),
        documents=len(examples),
    )
    done = _done(config.output, origin)
    each = token_bytes(target.config.hidden_size, len(layers))
    sizes = [len(example.ids) * each + 4 for example in examples]
    shards = _shards(sizes, config.shard_bytes)
    shard_sizes = [HEADER + sum(sizes[i] for i in shard) for shard in shards]
    left = sum(size for number, size in enumerate(shard_sizes) if number not in done)
    tokens = sum(len(example.ids) for example in examples)
    plan = Plan(origin, shards, done, tokens, sum(shard_sizes), left)
    needed = left
    if left:
        rows = target.config.hidden_size * (len(layers) + 1) * target.dtype.itemsize
        needed += passing * rows
    _check_room(config.output, plan, needed)
    return plan


def in_process(target: Target, feature_layers: tuple[int, ...]) -> Run:
    """The target of this process, by the very forward that training runs."""

    def run(documents: list[list[int]]) -> Generator[TargetOutput]:
        for ids in documents:
            yield run_target(target, _sequence(ids, target.device), feature_layers)

    return run


def capture(
    run: Run,
    examples: list[Example],
    output: Path,
    plan: Plan,
    on_document: Callable[[], None] = lambda: None,
) -> None:
    """Write the shards that `plan` still lacks. Raises OSError when the disk refuses, and what
    `run` raises; the shards before it stay, and the next call continues after them."""
    output.mkdir(parents=True, exist_ok=True)
    done = dict(plan.done)
    write_manifest(output, Manifest(plan.origin, tuple(done.values())))
    todo = [number for number in range(len(plan.shards)) if number not in done]
    documents = [examples[i].ids for number in todo for i in plan.shards[number]]

    def counted(outputs: Iterator[TargetOutput]) -> Iterator[TargetOutput]:
        for one in outputs:
            yield one
            on_document()

    # One run over all of them: vLLM starts once, and works on while a shard is written.
    with closing(run(documents)) as outputs:
        for number in todo:
            part = [examples[i] for i in plan.shards[number]]
            made = counted(islice(outputs, len(part)))
            done[number] = write_shard(output / _file_name(number), part, made)
            shards = tuple(done[n] for n in sorted(done))
            write_manifest(output, Manifest(plan.origin, shards))


def _sequence(document: list[int], device: torch.device) -> Sequence:
    ids = torch.tensor(document, device=device)
    return Sequence(ids, torch.zeros_like(ids).bool(), torch.zeros_like(ids))


def _file_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _shards(sizes: list[int], most: int) -> list[range]:
    """Documents of each shard, in order: as many as `most` bytes hold, at least one."""
    starts = [0]
    filled = 0
    for number, size in enumerate(sizes):
        if filled and filled + size > most:
            starts.append(number)
            filled = 0
        filled += size
    return [range(a, b) for a, b in pairwise([*starts, len(sizes)])]


def _done(output: Path, origin: Origin) -> dict[int, Shard]:
    """Shards of a former run of the same capture that are still there."""
    if not (output / MANIFEST).is_file():
        return {}
    manifest = read_manifest(output)
    if how := difference(manifest.origin, origin):
        raise InputError(f"output {output}: {how}: name another folder, or the same settings")
    listed = {shard.file: shard for shard in manifest.shards}
    done: dict[int, Shard] = {}
    for number in range(origin.documents):
        file = output / _file_name(number)
        shard = listed.get(file.name)
        if shard and file.is_file() and file.stat().st_size == shard.bytes:
            done[number] = shard
    return done


def _check_room(output: Path, plan: Plan, needed: int) -> None:
    there = next(p for p in (output, *output.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise InputError(
            f"output {output}: needs {size_text(needed)} for {plan.origin.documents} documents "
            f"({plan.tokens} tokens), {size_text(free)} are free: make room, or name another folder"
        )


def size_text(size: int) -> str:
    """Write bytes as "1.5 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
