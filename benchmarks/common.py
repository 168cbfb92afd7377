"""What the benchmarks share: options, prompts, heads, and how results are recorded."""

import argparse
import hashlib
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils import logging

from peagle.bench import run, workload
from peagle.bench.side_by_side import device_name
from peagle.catalog import find_entry, head_path
from peagle.cli.common import progress_bar
from peagle.data.captured import Captured
from peagle.data.chat import prompt_ids
from peagle.data.example import Example
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Completion
from peagle.model.target import Target
from peagle.train.capture import CaptureConfig, capture, in_process, plan_capture

TARGET = "smollm2-135m"
METHODS = ("eagle3", "p-eagle")
RESULTS = Path(__file__).resolve().parent / "results"
PROBLEMS = 164  # in HumanEval


def options(description: str | None, output: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for method in METHODS:
        parser.add_argument(f"--{method}", type=Path, default=head_path(TARGET, method),
                            metavar="HEAD", help=f"folder of the {method} head")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS / output, help="JSON file to write")
    return parser


def heads(args: argparse.Namespace) -> dict[str, Path]:
    """The heads to measure, by method."""
    folders = {method: getattr(args, method.replace("-", "_")) for method in METHODS}
    for method, folder in folders.items():
        if folder is None or not folder.is_dir():
            sys.exit(f"no {method} head at {folder}: name one with --{method}")
    return folders


def catalog_k() -> dict[str, int]:
    """The K of the catalog's heads, by method: the fastest of `peagle bench smollm2-135m --limit 10
    --max-tokens 96 --k 1,2,3,4,5,6,7` (the demo answers other prompts)."""
    heads = find_entry(TARGET).heads
    return {method: heads[method].k for method in METHODS}


def whole_numbers(text: str) -> list[int]:
    """ "3,5,7" → [3, 5, 7], for argparse."""
    return [int(part) for part in text.split(",")]


def load(
    dtype: str, batch: int = 1, *, deterministic: bool = False, quantize: str | None = None
) -> LLM:
    """The demo target, without a head as yet."""
    logging.disable_progress_bar()
    return LLM(TARGET, dtype=dtype, max_batch=batch, deterministic=deterministic, quantize=quantize)


def human_eval(limit: int = PROBLEMS) -> list[str]:
    """The first HumanEval problems, asked as the demo asks its own (which are the last ones)."""
    return workload.human_eval()[:limit]


def as_ids(llm: LLM, questions: list[str]) -> list[list[int]]:
    """Each question as token ids, through the chat template."""
    return [prompt_ids(llm.tokenizer, [{"role": "user", "content": q}]) for q in questions]


def decode(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    label: str,
) -> list[Completion]:
    """`llm.generate` with a progress bar."""
    run = llm.stream(prompts, params)
    with progress_bar(label) as bar:
        task = bar.add_task("", total=len(prompts))
        for _ in run:
            finished = sum(request.finish_reason is not None for request in run.requests)
            bar.update(task, completed=finished)
    return run.completions()


def captured(folder: Path, target: Target, examples: list[Example], length: int) -> Captured:
    """What the target makes of documents of at most `length` tokens, captured into `folder`."""
    config = CaptureConfig(folder, max_length=length)
    plan = plan_capture(target, examples, config)
    capture(in_process(target, plan.origin.feature_layers), examples, folder, plan)
    return Captured(folder)


def fingerprint(head: Path) -> str:
    """Changes when a head's weights do."""
    digest = hashlib.sha256()
    for file in sorted(head.rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def environment() -> dict[str, Any]:
    """Where numbers were measured."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    versions = {"python": platform.python_version(), **packages}
    return {"device": device_name(), "versions": versions}


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, whole or not at all."""
    run.write_json(path, report)
    print(f"written: {path}", flush=True)
