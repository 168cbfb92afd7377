"""Runs the target over every training document once and keeps its output on disk for training.

The documents of a shard depend on their lengths alone, and its file appears when it is whole: a
capture that was killed continues at the first shard that is missing. Part i of n has every n-th
shard, from the i-th one: together they make the files that one capture makes, in one folder or in
several. The engine that runs the
target, this process or vLLM (vllm/capture.py), is not recorded: they differ by rounding, as devices
and dtypes do, and one may finish what the other began.
"""

import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from peagle.data import captured
from peagle.data.captured import Origin, write_shard
from peagle.data.example import Examples, fingerprint
from peagle.errors import InputError, check_at_least
from peagle.model.config import default_feature_layers
from peagle.model.target import Target, TargetOutput
from peagle.train.passes import fast_products, run_document

MAX_HEADER = 2048  # bytes of a shard's header
# The target over documents' token ids, in their order.
Run = Callable[[Sequence[list[int]]], Generator[TargetOutput]]


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """Settings of a capture.

    output: Folder for the shards; documents that it holds are not captured again.
    feature_layers: Target layers whose inputs are captured, as 2,15,27; the number of layers is
        the output of the last one. Default: 2, n/2 and n - 3 of n layers.
    max_length: Maximum length of a document in tokens, less than the target's context; the rest is
        cut.
    shard_bytes: Size of one shard file in bytes.
    """

    output: Path
    feature_layers: tuple[int, ...] | None = None
    max_length: int = 1024
    shard_bytes: int = 512_000_000
    part: tuple[int, int] = (1, 1)  # number, from 1, and count of parts

    def __post_init__(self) -> None:
        number, count = self.part
        if not 1 <= number <= count:
            raise InputError("must be 1/n to n/n", field="part", value=f"{number}/{count}")
        check_at_least(1, shard_bytes=self.shard_bytes)


class Ids(Sequence[list[int]]):
    """Token ids of some documents, each read when it is asked for."""

    def __init__(self, examples: Examples, numbers: Sequence[int]) -> None:
        self.examples = examples
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> list[int]:  # type: ignore[override]
        return self.examples[self.numbers[number]].ids


class Plan(NamedTuple):
    """The shards of a capture, and those of one part. Bytes are those of files on disk."""

    origin: Origin
    shards: list[range]  # documents of each
    part: range  # numbers of the part's shards
    done: set[int]  # numbers of those that a former run wrote
    tokens: int  # of the part
    bytes: int
    bytes_left: int  # the rest, without the shards in `done`

    @property
    def documents(self) -> int:
        """Documents of the part."""
        return sum(len(self.shards[number]) for number in self.part)


def plan_capture(
    target: Target, examples: Examples, config: CaptureConfig, *, passing: int = 0
) -> Plan:
    """Plan the capture of `examples` into `config.output`, which may have a part of it already; at
    most `passing` tokens of the target's output lie next to the shards meanwhile.

    Raises InputError when another capture is there, or the disk has too little room.
    """
    layers = config.feature_layers or default_feature_layers(target.num_layers)
    if list(layers) != sorted(set(layers)):
        why = "must be strictly ascending (a target of fewer than 7 layers has no defaults)"
        value = ",".join(map(str, layers))
        raise InputError(why, field="feature_layers", value=value, fix="name others")
    target.check_layers(layers)
    origin = Origin(
        target=target.name,
        **captured.target_hashes(target),
        feature_layers=tuple(layers),
        max_length=config.max_length,
        shard_bytes=config.shard_bytes,
        data=fingerprint(examples),
        documents=len(examples),
    )
    each = captured.token_bytes(target.config.hidden_size, len(layers))
    lengths = [len(example.ids) for example in examples]
    shards = _shards([length * each + 4 for length in lengths], config.shard_bytes)
    number, count = config.part
    part = range(number - 1, len(shards), count)
    done = _done(config.output, origin, shards) & set(part)
    tokens = {shard: sum(lengths[i] for i in shards[shard]) for shard in part}
    sizes = {n: MAX_HEADER + tokens[n] * each + 4 * len(shards[n]) for n in part}
    left = sum(size for shard, size in sizes.items() if shard not in done)
    plan = Plan(origin, shards, part, done, sum(tokens.values()), sum(sizes.values()), left)
    if left:
        row = target.config.hidden_size * (len(layers) + 1) * target.dtype.itemsize
        documents = f"{plan.documents} documents ({plan.tokens} tokens)"
        _check_room(config.output, left + passing * row, documents)
    return plan


def in_process(target: Target, feature_layers: tuple[int, ...]) -> Run:
    """Run the target in this process, by the forward that training runs."""

    def run(documents: Sequence[list[int]]) -> Generator[TargetOutput]:
        for document in documents:
            with fast_products(target.device):  # not while others go on
                output = run_document(target, document, feature_layers)
            yield output

    return run


def capture(
    run: Run,
    examples: Examples,
    output: Path,
    plan: Plan,
    on_document: Callable[[], None] = lambda: None,
) -> None:
    """Write the shards that the part still lacks. Raises OSError when the disk refuses, and the
    errors of `run`; the shards before it stay, and the next call continues after them."""
    output.mkdir(parents=True, exist_ok=True)
    todo = [number for number in plan.part if number not in plan.done]
    documents = Ids(examples, [i for number in todo for i in plan.shards[number]])

    def counted(outputs: Iterator[TargetOutput]) -> Iterator[TargetOutput]:
        for one in outputs:
            yield one
            on_document()

    # One run over all of them: vLLM starts once, and works on while a shard is written.
    with closing(run(documents)) as outputs:
        for number in todo:
            documents_of_shard = plan.shards[number]
            part = [examples[i] for i in documents_of_shard]
            made = counted(islice(outputs, len(part)))
            path = output / f"shard-{number:05d}.safetensors"
            write_shard(path, plan.origin, documents_of_shard.start, part, made)


def _shards(sizes: list[int], max_bytes: int) -> list[range]:
    """Documents of each shard, in order: all that fit into `max_bytes`, at least one."""
    starts = [0]
    filled = 0
    for number, size in enumerate(sizes):
        if filled and filled + size > max_bytes:
            starts.append(number)
            filled = 0
        filled += size
    return [range(a, b) for a, b in pairwise([*starts, len(sizes)])]


def _done(output: Path, origin: Origin, shards: list[range]) -> set[int]:
    """Numbers of the shards that a former run of the same capture left."""
    found = captured.read_shards(output)
    if found and (how := captured.difference(found[0].origin, origin)):
        fix = "name another folder, or the same settings"
        raise InputError(how, field="output", value=output, fix=fix)
    starts = {shard.first for shard in found}
    return {number for number, shard in enumerate(shards) if shard.start in starts}


def _check_room(output: Path, needed: int, documents: str) -> None:
    there = next(p for p in (output, *output.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        why = f"needs {size_text(needed)} for {documents}, {size_text(free)} are free"
        raise InputError(why, field="output", value=output, fix="make room, or name another folder")


def size_text(size: int) -> str:
    """Write bytes as "1.5 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
