"""Code shared by the benchmarks: options, prompts, heads, and records of results."""

import argparse
import hashlib
import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from transformers.utils import logging

from peagle.bench import run, workload
from peagle.bench.native import device_name
from peagle.bench.summary import Played, Sample
from peagle.catalog import find_entry
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.request import Stats
from peagle.heads.find import find_head
from peagle.model.template import use_template
from peagle.paths import cache_dir

TARGET = "smollm2-135m"
METHODS = ("eagle3", "p-eagle")
RESULTS = Path(__file__).resolve().parent / "results"
PROBLEMS = 164  # in HumanEval

Plays = dict[str, Played]  # by the way they were played


def options(description: str | None, output: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for method in METHODS:
        head = find_head(TARGET, method=method)
        parser.add_argument(f"--{method}", type=Path, default=head and head.folder,
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


def load(  # noqa: PLR0913 (the settings of a target)
    dtype: str,
    batch: int = 1,
    *,
    target: str = TARGET,
    deterministic: bool = False,
    quantize: str | None = None,
) -> LLM:
    """Load a target without a head; one without a chat template gets the plain one. Costs of rounds
    are measured anew, so that no way begins with what an earlier run has learnt."""
    rmtree(cache_dir() / "costs", ignore_errors=True)
    logging.disable_progress_bar()
    how = {"dtype": dtype, "quantize": quantize}
    llm = LLM(target, lookup=False, max_batch=batch, deterministic=deterministic, **how)
    if llm.tokenizer.chat_template is None:
        use_template(llm.tokenizer, "plain")
    return llm


def human_eval(limit: int = PROBLEMS) -> list[str]:
    """The first HumanEval problems as prompts. (The demo uses the last ones.)"""
    return workload.human_eval()[:limit]


def as_ids(llm: LLM, questions: list[str]) -> list[list[int]]:
    """Each question as token ids, through the chat template."""
    return [prompt_ids(llm.tokenizer, [{"role": "user", "content": q}]) for q in questions]


def fingerprint(head: Path) -> str:
    """A hash of a head's weights."""
    weights = b"".join(file.read_bytes() for file in sorted(head.rglob("*.safetensors")))
    return hashlib.sha256(weights).hexdigest()[:16]


def environment(device: str = "cpu") -> dict[str, Any]:
    """The device, by its name in torch, and the versions of this measurement."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    versions = {"python": platform.python_version(), **packages}
    return {"device": device_name(torch.device(device)), "versions": versions}


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, whole or not at all."""
    run.write_json(path, report)
    print(f"written: {path}", flush=True)


class Journal:
    """A JSON Lines file: the settings first, then each measured turn in order."""

    def __init__(self, file: Path, about: dict[str, Any], *, resume: bool) -> None:
        """Open the file; exit if `resume` finds one with other settings."""
        self.file = file
        self.plays = dict[str, dict[int, Plays]]()  # by part and number
        if resume and file.is_file():
            self._read(json.loads(json.dumps(about)))
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(about) + "\n")

    def add(self, part: str, number: int, plays: Plays) -> None:
        """Record the plays of one conversation of a part, by way."""
        self.plays.setdefault(part, {})[number] = plays
        kept = {way: _kept(played) for way, played in plays.items()}
        with self.file.open("a") as lines:
            lines.write(json.dumps({"part": part, "number": number, "plays": kept}) + "\n")

    def of(self, part: str) -> dict[int, Plays]:
        """Plays of a part, by number."""
        return self.plays.setdefault(part, {})

    def _read(self, about: dict[str, Any]) -> None:
        text = self.file.read_text()
        whole = text[: text.rfind("\n") + 1]  # the last line may have been cut short
        self.file.write_text(whole)
        before, *lines = map(json.loads, whole.splitlines())
        other = sorted(key for key in about if before.get(key) != about[key])
        if other:
            sys.exit(f"{self.file}: measured with other {', '.join(other)}: leave out --resume")
        for line in lines:
            plays = {way: _played(**kept) for way, kept in line["plays"].items()}
            self.plays.setdefault(line["part"], {})[line["number"]] = plays


def _kept(played: Played) -> dict[str, Any]:
    samples = [asdict(sample) | {"text": ""} for sample in played.samples]
    return {"seconds": played.seconds, "samples": samples, "drafting": asdict(played.drafting)}


def _played(seconds: float, samples: list[dict[str, Any]], drafting: dict[str, Any]) -> Played:
    asked = [Sample(**sample | {"output": tuple(sample["output"])}) for sample in samples]
    return Played(asked, seconds, Stats(**drafting))
