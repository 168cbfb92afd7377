"""From prompts to an exported head: two processes and a capture in parts make what one of each
makes."""

import json
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import forked, free_port
from safetensors.torch import load_file
from tiny import make_target, save_target

from peagle.data.captured import write_shard
from peagle.train import capture as capture_module

PARTS = 4
SMALL = "--layers 2 --depths 4 --draft-vocab 112 --lr 3e-3 --batch 2 --segments 1 --save-every 4"


def peagle(environment: dict[str, str], shards: int, *args: object) -> None:
    """A command in this process, which kills itself before it writes one shard more than these."""
    from peagle.cli.main import app  # noqa: PLC0415 (in the fork)

    written = list[None]()

    def write(*shard: Any) -> None:
        if len(written) == shards:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(None)
        write_shard(*shard)

    torch.set_num_threads(1)
    capture_module.write_shard = write
    os.environ.update(environment)
    app([str(arg) for arg in args], standalone_mode=False)


def start(*args: object, shards: int = 999, **environment: str) -> BaseProcess:
    return forked(peagle, environment, shards, *args)


def together(*processes: BaseProcess) -> list[int | None]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@pytest.mark.slow
def test_two_processes_and_four_parts_make_the_same_head(tmp_path: Path) -> None:
    target = save_target(make_target(layers=7), tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    texts = ("the cat", "a hat", "what a day", "the mat", "ran", "the dog", "sat", "a cat")
    lines = [json.dumps({"turns": [text, "the cat"]}) for text in texts]
    prompts.write_text("\n".join(lines) + "\n")

    def answered(folder: Path) -> tuple[object, ...]:
        made = folder / "answers.jsonl"
        folder.mkdir()
        ask = ("data", "regenerate", target, "--prompts", prompts, "--output", made)
        assert together(start(*ask, "--max-tokens", 24)) == [0]
        return ("data", "capture", target, "--data", made, "--shard-mb", 0.01, "--output")

    def trained(folder: Path, *data: object, processes: int) -> Path:
        run = folder / "run"
        more = ("--resume", "auto", *SMALL.split(), "--output", run)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks = [{**shared, "WORLD_SIZE": str(processes), "RANK": r, "LOCAL_RANK": r} for r in "01"]
        environments = ranks if processes == 2 else [{}]
        for steps in (4, 8):  # the same command begins, and goes on
            command = ("train", target, *data, *more, "--steps", steps)
            done = together(*(start(*command, **each) for each in environments))
            assert done == [0] * processes
        exported = folder / "exported"
        assert together(start("export", run / "head", exported, "--to", "vllm")) == [0]
        return exported / "model.safetensors"

    one, two = tmp_path / "one", tmp_path / "two"
    assert together(start(*answered(one), one / "captured")) == [0]
    head = trained(one, "--data", one / "captured", processes=1)

    capture = answered(two)
    folders = [two / "a", two / "a", two / "b", two / "b"]  # of two machines
    parts = [(*capture, f, "--part", f"{i}/{PARTS}") for i, f in enumerate(folders, start=1)]
    ended = together(*(start(*part, shards=1 if part is parts[2] else 999) for part in parts))
    assert ended == [0, 0, -signal.SIGKILL, 0]
    assert together(start(*parts[2])) == [0]
    shards = [path for f in ("a", "b") for path in (two / f).iterdir()]
    whole = {path.name: path.read_bytes() for path in (one / "captured").iterdir()}
    assert len(whole) >= 2 * PARTS
    assert {path.name: path.read_bytes() for path in shards} == whole

    other = trained(two, "--data", two / "a", "--data", two / "b", processes=2)
    weights, others = load_file(head), load_file(other)
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name
