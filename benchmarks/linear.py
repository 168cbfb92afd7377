"""Time of the demo target's matrix products on a CPU: by torch, and native in bf16, int8 and int4.

    python benchmarks/linear.py [--threads 1,2] [--rows 1,4,8,16,32,64]

Each product is taken with as many different matrices in turn as the model has layers, so that
weights come from memory; kinds change from round to round, so that noise hits all alike; the least
of the rounds. 960 and 3072 outputs are q, k, v and gate, up as one product.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, TARGET, environment, whole_numbers, write_json
from torch import Tensor, nn

from peagle.backends.cpu.matrix import CpuLinear
from peagle.backends.cpu.quantized import quantized
from peagle.cli.common import progress_bar

KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "torch": lambda layer: layer,
    "native": CpuLinear.of,
    "int8": partial(quantized, kind="int8"),
    "int4": partial(quantized, kind="int4"),
}
LAYERS, HEAD = 30, 2  # matrices of a shape; of the output head's, which is large enough
SHAPES = {(576, 576): LAYERS, (192, 576): LAYERS, (960, 576): LAYERS, (1536, 576): LAYERS,
          (3072, 576): LAYERS, (576, 1536): LAYERS, (49152, 576): HEAD}  # fmt: skip


def seconds(layers: list[nn.Module], x: Tensor) -> float:
    """Time of one product."""
    started = time.perf_counter()
    for layer in layers:
        layer(x)
    return (time.perf_counter() - started) / len(layers)


def measure(layers: dict[str, list[nn.Module]], x: Tensor, repeats: int) -> dict[str, float]:
    """Microseconds a product by kind: the least of several rounds, the first one left out."""
    rounds = [{kind: seconds(made, x) for kind, made in layers.items()} for _ in range(repeats + 1)]
    return {kind: round(min(r[kind] for r in rounds[1:]) * 1e6, 1) for kind in layers}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=whole_numbers, default=[1, 2])
    parser.add_argument("--rows", type=whole_numbers, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "linear.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    report: list[dict[str, Any]] = []
    with progress_bar("products") as bar:
        task = bar.add_task("", total=len(SHAPES))
        for (outputs, inputs), count in SHAPES.items():
            plain = [nn.Linear(inputs, outputs, bias=False).bfloat16() for _ in range(count)]
            layers = {kind: [make(layer) for layer in plain] for kind, make in KINDS.items()}
            for threads in args.threads:
                torch.set_num_threads(threads)
                for rows in args.rows:
                    x = torch.randn(rows, inputs).bfloat16()
                    found = measure(layers, x, args.repeats)
                    where = {"outputs": outputs, "inputs": inputs, "threads": threads, "rows": rows}
                    report.append({**where, "microseconds": found})
                    print(*where.values(), found, flush=True)
            bar.advance(task)
    write_json(args.output, {"target": TARGET, **environment(), "rows": report})


if __name__ == "__main__":
    main()
