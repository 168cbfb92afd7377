"""The target over every training document once, kept on disk: training then never runs it again.

Which documents a shard holds depends on their lengths alone, and a shard counts once the manifest
lists it: a capture that was killed goes on at the first shard that does not. What runs the target,
this process or vLLM (vllm/capture.py), is not recorded: they differ by rounding, as devices
and dtypes do, and one may finish what the other began.
"""

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import torch

from peagle.data.captured import (
    MANIFEST,
    Manifest,
    Origin,
    difference,
    fingerprint,
    read_manifest,
    write_manifest,
)
from peagle.data.chat import Example
from peagle.data.shard import DTYPES, Shard, token_bytes, write_shard
from peagle.errors import InputError
from peagle.model.config import default_feature_layers
from peagle.model.target import Target, TargetOutput
from peagle.train.step import Sequence, run_target

HEADER = 1024  # bytes of a shard besides its tokens and documents, at most
# The target over documents' token ids, in their order.
Run = Callable[[list[list[int]]], Generator[TargetOutput]]


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """What is captured, and into files of what size."""

    output: Annotated[
        Path, "Folder for the shards; documents that it holds are not captured again."
    ]
    feature_layers: Annotated[
        tuple[int, ...] | None,
        "Target layers whose hidden states are captured, as 2,15,27. Default: those of vLLM.",
    ] = None
    dtype: Annotated[
        str, "Data type of the captured features: bfloat16, or fp8 for half the disk."
    ] = "bfloat16"
    max_length: Annotated[int, "Maximum length of a document in tokens; the rest is cut."] = 1024
    shard_bytes: Annotated[int, "Size of one shard file in bytes."] = 512_000_000

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r}: choose {' or '.join(DTYPES)}")
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
    """What a capture of `examples` into `config.output` has still to do; at most `passing` tokens
    of the target's output lie beside the shards meanwhile.

    Raises InputError when another capture is there, or the disk has too little room.
    """
    layers = config.feature_layers or default_feature_layers(len(target.layers))
    if list(layers) != sorted(set(layers)):
        why = "must be strictly ascending (a target of fewer than 7 layers has no defaults)"
        raise InputError(f"feature layers {list(layers)}: {why}: name others")
    target.check_layers(layers)
    origin = Origin(
        target.name,
        target.config_hash(),
        target.weights_hash(),
        target.template_hash(),
        tuple(layers),
        config.dtype,
        config.max_length,
        config.shard_bytes,
        fingerprint(examples),
        len(examples),
    )
    each = token_bytes(target.config.hidden_size, len(layers), config.dtype)
    shards = _shards([len(e.ids) * each + 4 for e in examples], config.shard_bytes)
    sizes = [HEADER + sum(len(examples[i].ids) * each + 4 for i in shard) for shard in shards]
    done = _done(config.output, origin)
    left = sum(size for number, size in enumerate(sizes) if number not in done)
    tokens = sum(len(e.ids) for e in examples)
    plan = Plan(origin, shards, done, tokens, sum(sizes), left)
    rows = target.config.hidden_size * (len(layers) + 1) * target.dtype.itemsize
    _check_room(config.output, plan, passing * rows if left else 0)
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
    """Make the shards that `plan` still lacks. Raises OSError when the disk refuses, and what `run`
    raises; the shards before it stay, and the next call goes on behind them."""
    output.mkdir(parents=True, exist_ok=True)
    done = dict(plan.done)
    write_manifest(output, Manifest(plan.origin, tuple(done.values())))
    parts = {
        n: [examples[i] for i in plan.shards[n]] for n in range(len(plan.shards)) if n not in done
    }

    def counted(said: Iterator[TargetOutput]) -> Iterator[TargetOutput]:
        for one in said:
            yield one
            on_document()

    # One run over all of them: vLLM starts once, and works on while a shard is written.
    with closing(run([example.ids for part in parts.values() for example in part])) as said:
        for number, part in parts.items():
            path, outputs = output / _file_name(number), counted(islice(said, len(part)))
            done[number] = write_shard(path, part, outputs, plan.origin.dtype)
            shards = tuple(done[n] for n in sorted(done))
            write_manifest(output, Manifest(plan.origin, shards))


def _sequence(document: list[int], device: torch.device) -> Sequence:
    ids = torch.tensor(document, device=device)
    return Sequence(ids, torch.zeros_like(ids).bool(), torch.zeros_like(ids))


def _file_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _shards(sizes: list[int], most: int) -> list[range]:
    """Documents of each shard, in order: as many as `most` bytes hold, at least one."""
    starts, filled = [0], 0
    for number, size in enumerate(sizes):
        if filled and filled + size > most:
            starts.append(number)
            filled = 0
        filled += size
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _done(output: Path, origin: Origin) -> dict[int, Shard]:
    """Shards of a former run of the same capture that are still there."""
    if not (output / MANIFEST).is_file():
        return {}
    was, shards = read_manifest(output)
    if how := difference(was, origin):
        raise InputError(f"--output {output}: {how}: name another folder, or the same settings")
    found = {shard.file: shard for shard in shards if _is_there(output, shard)}
    return {n: found[name] for n in range(origin.documents) if (name := _file_name(n)) in found}


def _is_there(output: Path, shard: Shard) -> bool:
    file = output / shard.file
    return file.is_file() and file.stat().st_size == shard.bytes


def _check_room(output: Path, plan: Plan, passing: int) -> None:
    there = next(p for p in (output, *output.absolute().parents) if p.exists())
    if (free := shutil.disk_usage(there).free) < (needed := plan.bytes_left + passing):
        raise InputError(
            f"--output {output}: needs {size_text(needed)} for {plan.origin.documents} "
            f"documents ({plan.tokens} tokens), {size_text(free)} are free: make room, name "
            "another folder, or give --dtype fp8"
        )


def size_text(size: int) -> str:
    """ "1.5 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
