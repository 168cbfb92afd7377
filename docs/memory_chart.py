"""Measure and draw peak memory by the length of a document: docs/figures/memory.json, two charts.

    python docs/memory_chart.py [--measure] [--lengths 2000,5000] [--output docs/figures]

Targets have the shapes of GPT-OSS (64 heads, sinks, windows, experts) and of Llama, but are narrow,
with random weights. Each figure is the peak of a `peagle` command in a process of its own: a
capture of one document, and one step of training on it, in one pass; `plan` is what `peagle plan`
expects of that step. `partial` is the peak of training from a capture and of an export, for a
larger target of GPT-OSS's shape: as they are, which read three tensors and the last layer of the
target, and with the whole target loaded. Without --measure the charts are drawn.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from speedup_chart import HERE, Look, colour, save
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedTokenizerFast

from peagle.bench.native import device_name

RESULT = HERE / "figures" / "memory.json"
WORDS = 4000
# A child's peak includes that of the process that started it, until it runs its own program.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
# The same command, but it loads all of the target.
WHOLE = """
from peagle.model import loader, partial
def whole(name, *, layers=1, device="cpu"):
    return loader.load_target(name, device=device)
partial.load_partial = whole
from peagle.cli.main import main
main()
"""
LINES = {"train eagle3": ("EAGLE-3, a step", ":"), "train": ("P-EAGLE, a step", "-"),
         "capture": ("capture", "--")}  # fmt: skip
COLOURS = {"gpt-oss": "p-eagle", "llama": "eagle3"}


def configs() -> dict[str, Any]:
    """Targets by name."""
    sizes = {"vocab_size": WORDS + 96, "hidden_size": 128, "num_hidden_layers": 8, "head_dim": 8,
             "max_position_embeddings": 32_768, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
    oss = {"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 8,
           "intermediate_size": 64, "num_experts_per_tok": 4, "sliding_window": 128}  # fmt: skip
    llama = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 512,
             "tie_word_embeddings": False}  # fmt: skip
    return {"gpt-oss": GptOssConfig(**sizes, **oss), "llama": LlamaConfig(**sizes, **llama)}


def make(folder: Path, config: Any) -> None:
    """Write a target with random weights in bf16."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = {str(number): number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def peak(*command: object, entry: tuple[str, ...] = ("-m", "peagle")) -> int:
    """Peak memory of a `peagle` command, in bytes."""
    line = [sys.executable, "-c", PEAK, sys.executable, *entry, *map(str, command)]
    return int(subprocess.check_output(line, text=True))


def planned(*command: object) -> int:
    """Peak memory that `peagle plan` expects, in bytes."""
    line = [sys.executable, "-m", "peagle", "plan", *map(str, command), "--json"]
    return int(json.loads(subprocess.check_output(line, text=True))["total_bytes"])


def measure_partial() -> dict[str, Any]:
    """Peaks of training from a capture and of an export in bytes, with all of the target and with a
    part of it."""
    config = configs()["gpt-oss"]
    config.update({"num_hidden_layers": 24, "hidden_size": 512, "num_local_experts": 32,
                   "intermediate_size": 512, "layer_types": config.layer_types * 3})  # fmt: skip
    found: dict[str, Any] = {"train": {}, "export": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target, data, captured = (folder / each for each in ("target", "data", "captured"))
        make(target, config)
        found["target"] = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        document = json.dumps({"prompt_ids": [2, 3, 4, 5], "answer_ids": [*range(2, 400)]})
        data.write_text("\n".join([document] * 20))
        plain = ("--chat-template", "plain")
        peak("data", "capture", target, "--data", data, "--output", captured, *plain)
        for name, entry in (("part", ("-m", "peagle")), ("whole", ("-c", WHOLE))):
            run = folder / name
            train = ("train", target, "--data", captured, "--output", run, "--steps", 1, *plain)
            found["train"][name] = peak(*train, "--layers", 1, entry=entry)
            exported = ("export", run / "head", folder / f"{name}-vllm", "--to", "vllm", *plain)
            found["export"][name] = peak(*exported, "--target", target, entry=entry)
    return found


def measure(lengths: list[int]) -> dict[str, Any]:
    """Peaks in bytes by target, command and length."""
    processor = device_name(torch.device("cpu"))
    found: dict[str, Any] = {"processor": processor, "lengths": lengths, "peaks": {}}
    for name, config in configs().items():
        peaks: dict[str, list[int]] = {}
        found["peaks"][name] = peaks
        for length in lengths:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                target, data, captured = (folder / each for each in ("target", "data", "captured"))
                make(target, config)
                ids = random.Random(0).choices(range(2, WORDS), k=length)
                data.write_text(json.dumps({"prompt_ids": ids[:4], "answer_ids": ids[4:]}))
                shared = ("--max-length", length, "--chat-template", "plain")
                store = ("data", "capture", target, "--data", data, "--output", captured, *shared)
                each = {"capture": peak(*store)}
                for method, end in (("p-eagle", ""), ("eagle3", " eagle3")):
                    head = ("--layers", 1, "--segments", 1, "--method", method)
                    run = ("--data", data, "--output", folder / method, "--steps", 1, "--batch", 1)
                    each["train" + end] = peak("train", target, *run, *head, *shared)
                    sizes = ("--tokens", length, "--context", length)
                    each["plan" + end] = planned(target, *sizes, *head)
            for key, size in each.items():
                peaks.setdefault(key, []).append(size)
            print(name, length, {key: each[-1] >> 20 for key, each in peaks.items()}, flush=True)
    return found


def draw(found: dict[str, Any], look: Look) -> Figure:
    """Peak memory in GB by length, a line for each target and command."""
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    axes = figure.subplots()
    for name, peaks in found["peaks"].items():
        for command, (measured, style) in LINES.items():
            sizes = [size / 1e9 for size in peaks[command]]
            ink = look.bars[COLOURS[name]]
            label = f"{name}: {measured}"
            axes.plot(found["lengths"], sizes, style, marker="o", color=ink, label=label)
    axes.set(xlabel="tokens of the document", ylabel="peak memory (GB)", ylim=(0, None))
    colour(axes, look)
    where = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend(frameon=False, labelcolor=look.ink, **where)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "figures")
    parser.add_argument("--lengths", default="2000,5000,10000,20000")
    args = parser.parse_args()
    if args.measure:
        found = measure([int(length) for length in args.lengths.split(",")])
        found["partial"] = measure_partial()
        RESULT.write_text(json.dumps(found, indent=2) + "\n")
    found = json.loads(RESULT.read_text())
    save(partial(draw, found), args.output, "memory")


if __name__ == "__main__":
    main()
