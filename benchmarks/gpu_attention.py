"""Attention over the paged cache on a GPU: its time over that of reading the keys and values it has
to read, at the bandwidth that a copy reaches.

    python benchmarks/gpu_attention.py [--past 1024,8192] [--requests 1,8,32] [--tokens 1,4,8]

Layers are taken in turn, so that keys come from memory and not from a cache; the median of runs.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, environment, whole_numbers, write_json
from torch.utils.benchmark import Timer

from peagle.backends.batch import BLOCK, Batch, Span
from peagle.backends.cuda.attention import CudaAttend, paged_attention
from peagle.backends.cuda.device_batch import DeviceBatch
from peagle.backends.kv_cache import KVCache
from peagle.model.attention import AttentionSpec, HeadShape

SHAPES = {  # query heads, key heads, head size; window
    "SmolLM2-135M": (9, 3, 64, None),
    "Llama-3.1-8B": (32, 8, 128, None),
    "gpt-oss-20b, a layer with a window": (64, 8, 64, 128),
    "Qwen3-Coder-30B-A3B": (32, 4, 128, None),
}
DTYPE = torch.bfloat16
ENOUGH = 1 << 30  # bytes of keys and values that all layers read together


def bandwidth(device: torch.device, count: int) -> float:
    """Bytes a second that a copy reads and writes."""
    x = torch.empty(count, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * count / seconds("y.copy_(x)", x=x, y=y)


def seconds(statement: str, **names: Any) -> float:
    return Timer(statement, globals=names).blocked_autorange(min_run_time=0.5).median


def row(
    shape: str, past: int, requests: int, tokens: int, device: torch.device, enough: int
) -> dict[str, Any]:
    heads, kv_heads, size, window = SHAPES[shape]
    each = -(-(past + tokens) // BLOCK)
    read = 2 * requests * min(past + tokens, (window or past) + tokens) * kv_heads * size * 2
    layers = max(2, enough // read)
    cache = KVCache(requests * each, [HeadShape(kv_heads, size, size)] * layers, DTYPE, device)
    for keys, values in cache.layers:
        keys.normal_()
        values.normal_()
    q = torch.randn(requests * tokens, heads, size, device=device).to(DTYPE)
    order = torch.randperm(requests * each).tolist()
    spans = [Span(order[i * each :][:each], past, [0] * tokens) for i in range(requests)]
    batch = DeviceBatch.of(Batch.of(spans), cache.padding, device)
    launch = CudaAttend(batch, cache, past + tokens, exact=False).launch(q, *cache.layers[0])
    spec = AttentionSpec(size**-0.5, window)

    def run() -> None:
        for keys, values in cache.layers:
            paged_attention(q, keys, values, batch, spec, launch)

    run()
    taken = seconds("run()", run=run) / layers
    return {
        "shape": shape, "past": past, "requests": requests, "tokens": tokens,
        "microseconds": taken * 1e6, "bytes": read, "bytes_per_second": read / taken,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--past", type=whole_numbers, default=[1024, 8192])
    parser.add_argument("--requests", type=whole_numbers, default=[1, 8, 32])
    parser.add_argument("--tokens", type=whole_numbers, default=[1, 4, 8])
    parser.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to try it")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu-attention.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    enough = ENOUGH if device.type == "cuda" else 0
    peak, rows = bandwidth(device, enough or 1 << 20), list[dict[str, Any]]()
    print(
        f"a copy: {peak / 1e9:.0f} GB/s", "past requests tokens    µs   GB/s   ÷ reading", sep="\n"
    )
    for shape in SHAPES:
        print(shape)
        for past in args.past:
            for requests in args.requests:
                for tokens in args.tokens:
                    found = row(shape, past, requests, tokens, device, enough)
                    found["over_reading"] = peak / found["bytes_per_second"]
                    rows.append(found)
                    print(
                        f"{past:5d} {requests:8d} {tokens:6d} {found['microseconds']:7.1f} "
                        f"{found['bytes_per_second'] / 1e9:6.0f} {found['over_reading']:7.2f}"
                    )
    write_json(args.output, {**environment(), "copy_bytes_per_second": peak, "rows": rows})


if __name__ == "__main__":
    main()
