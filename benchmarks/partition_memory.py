"""Peak memory of one training step against sequence length and number of segments, K = 8.

    python benchmarks/partition_memory.py [--device cuda] [--lengths 1024,2048] [--segments 1,2,4]

Every cell is a process of its own. On a CPU the figure is the growth of its peak resident memory
over the step; on CUDA what the allocator handed out. Flat passes (S = 1) on a CPU end at 4,096
tokens: their dense mask alone grows with the square. Writes a table and a plot.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from common import RESULTS, environment, whole_numbers, write_json
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.model.config import DrafterConfig
from peagle.model.drafter import Drafter
from peagle.model.target import Target, TargetOutput
from peagle.train.cod import sample_elements
from peagle.train.partition import partition
from peagle.train.step import Sequence, Trainee

SIZES = {"cpu": (256, 1024), "cuda": (2880, 8192)}  # hidden size, draft vocabulary
DEPTHS, RATIO, LAYERS = 8, 0.8, 4
FLAT_LIMIT = 4096  # tokens, on a CPU


def make(device: torch.device) -> tuple[Trainee, int]:
    """A drafter for a one-layer target: what is measured is the drafter."""
    hidden, vocab = SIZES[device.type]
    sizes = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "vocab_size": vocab,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 32768,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).to(device, torch.bfloat16)
    target = Target(model.eval(), None, "random")
    config = DrafterConfig(
        "p-eagle", LlamaConfig(**sizes, num_hidden_layers=LAYERS), (0, 1, 2), vocab, hidden,
        mask_token_id=1, depths=DEPTHS, embedding="mask-row",
    )  # fmt: skip
    drafter = Drafter(config).to(device)
    drafter.share_embedding(target.embedding)
    return Trainee(drafter, target), hidden


def step(length: int, segments: int, device: torch.device) -> dict[str, float]:
    """Forward and backward of one sequence; bytes at the peak above what the weights take."""
    trainee, hidden = make(device)
    ids = torch.zeros(length, dtype=torch.int64)
    supervised = torch.arange(length) >= length // 8
    generator = torch.Generator().manual_seed(0)
    elements = sample_elements(supervised, ids, DEPTHS, RATIO, generator)
    moved = [x.to(device) for x in (ids, supervised, ids)]
    sequence, on_device = Sequence(*moved), type(elements)(*(x.to(device) for x in elements))
    said = TargetOutput(
        torch.randn(length, hidden, device=device, dtype=torch.bfloat16),
        torch.randn(length, 3 * hidden, device=device, dtype=torch.bfloat16),
    )
    for parameter in trainee.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = used(device)
    for part in partition(on_device, sequence.documents, segments):
        trainee(sequence, said, part).loss.backward()
    return {"elements": len(elements.anchor), "bytes": used(device) - before}


def used(device: torch.device) -> int:
    """Peak bytes so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plot(rows: list[dict], output: Path) -> None:
    """Peak memory against length, a line a number of segments."""
    import matplotlib  # noqa: PLC0415 (needed to draw only)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(6, 4))
    for segments in sorted({row["segments"] for row in rows}):
        line = [row for row in rows if row["segments"] == segments]
        axes.plot(
            [row["length"] for row in line],
            [row["gib"] for row in line],
            "o-",
            label=f"S = {segments}",
        )
    axes.set(xlabel="tokens of the sequence", ylabel="GiB above the weights", ylim=(0, None))
    axes.set_title(f"One training step, K = {DEPTHS}, {LAYERS} layers")
    axes.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=whole_numbers, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--segments", type=whole_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--output", type=Path, default=RESULTS / "partition_memory.json")
    parser.add_argument("--cell", type=whole_numbers, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(step(*args.cell, torch.device(args.device))))
        return
    rows = []
    print("length  S  elements     GiB")
    for length in args.lengths:
        for segments in args.segments:
            if segments == 1 and length > FLAT_LIMIT and args.device == "cpu":
                continue
            cell = [sys.executable, __file__, "--device", args.device, "--cell"]
            run = subprocess.run(
                [*cell, f"{length},{segments}"], capture_output=True, text=True, check=True
            )
            found = json.loads(run.stdout.splitlines()[-1])
            gib = round(found["bytes"] / 2**30, 3)
            rows.append(
                {"length": length, "segments": segments, "elements": found["elements"], "gib": gib}
            )
            print(f"{length:6} {segments:2} {found['elements']:9} {gib:7.3f}", flush=True)
    hidden, vocab = SIZES[args.device]
    settings = {"hidden_size": hidden, "layers": LAYERS, "draft_vocab": vocab, "depths": DEPTHS,
                "ratio": RATIO, "autocast": "bfloat16"}  # fmt: skip
    write_json(args.output, {**environment(), "settings": settings, "rows": rows})
    plot(rows, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
