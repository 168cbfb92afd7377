"""Time of the demo target's forward on a CPU by its rows, and how fast that reads the weights.

    python benchmarks/forward.py [--threads 2] [--rows 1,4,8,12,16,32,64] [--past 300]

Rows follow `--past` tokens of one request, and include the output head. Kinds of weights and
numbers of rows take turns; the median of the rounds. A plain read of as many bytes as bf16 weights
have is timed, too: a sum of float32 numbers, with as many threads.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from common import RESULTS, TARGET, environment, whole_numbers, write_json

from peagle.backends.base import TargetModel
from peagle.backends.batch import Batch, Span, blocks_of
from peagle.backends.cpu.backend import CpuBackend
from peagle.backends.cpu.quantized import quantize
from peagle.backends.kv_cache import KVCache
from peagle.model.loader import load_target

KINDS = ("bf16", "int8", "int4")
MIB = 2**20


class Forward:
    """A forward over one kind of weights, after a prompt."""

    def __init__(self, kind: str, past: int, most: int) -> None:
        target = load_target(TARGET, dtype="bfloat16")
        if kind != "bf16":
            target = quantize(target, kind)
        self.bytes = sum(part.numel() * part.element_size() for part in target.model.parameters())
        self.model: TargetModel = CpuBackend().target(target, own=True)
        self.blocks, self.past = range(blocks_of(past + most)), past
        cpu = torch.device("cpu")
        self.cache = KVCache(len(self.blocks), target.kv_shapes, target.dtype, cpu)
        self.model.forward(Batch.of([Span(self.blocks, 0, [7] * past)]), self.cache, ())

    def seconds(self, rows: int) -> float:
        batch = Batch.of([Span(self.blocks, self.past, [9] * rows)])
        started = time.perf_counter()
        out = self.model.forward(batch, self.cache, ())
        self.model.logits(out.hidden)
        return time.perf_counter() - started


def read_seconds(numbers: torch.Tensor) -> float:
    started = time.perf_counter()
    numbers.sum()
    return time.perf_counter() - started


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=whole_numbers, default=[1, 4, 8, 12, 16, 32, 64])
    parser.add_argument("--past", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "forward.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    forwards = {kind: Forward(kind, args.past, max(args.rows)) for kind in KINDS}
    size = forwards["bf16"].bytes
    numbers = torch.ones(size // 4)
    seconds: dict[tuple[str, int], list[float]] = {
        (kind, rows): [] for kind in KINDS for rows in args.rows
    }
    reads = list[float]()
    for repeat in range(-1, args.repeats):  # the first warms up
        reads += [read_seconds(numbers)]
        for (kind, rows), found in seconds.items():
            took = [forwards[kind].seconds(rows) for _ in range(3)]
            if repeat >= 0:
                found.extend(took)
    read = median(reads[1:])
    print(f"plain read of {size / MIB:.0f} MiB: {read * 1e3:.1f} ms, {size / read / 1e9:.1f} GB/s")
    table = []
    for kind in KINDS:
        found = {rows: median(seconds[kind, rows]) * 1e3 for rows in args.rows}
        shown = "  ".join(f"{rows}: {ms:.1f}" for rows, ms in found.items())
        print(f"{kind:5} ms by rows  {shown}")
        table.append({"weights": kind, "ms": {r: round(ms, 2) for r, ms in found.items()}})
    first = median(seconds["bf16", args.rows[0]])
    share = read / first
    print(
        f"bf16, {args.rows[0]} row(s): {size / first / 1e9:.1f} GB/s, {share:.0%} of the plain read"
    )
    report = {
        **environment(),
        "threads": args.threads,
        "past": args.past,
        "bytes": size,
        "read_ms": round(read * 1e3, 2),
        "share_of_read": round(share, 3),
        "rows": table,
    }
    write_json(args.output, report)


if __name__ == "__main__":
    main()
