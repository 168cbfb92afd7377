"""vLLM as what runs the target for a capture: in a process of its own, on as many GPUs as it takes.

It extracts the residual stream that enters the feature layers and the one that leaves the last
layer, and writes a file a document; these are read and deleted as they come, so that never more
than two windows of documents lie on the disk: one that is read, one that is made meanwhile.

Shapes: N tokens of a document, F feature layers, E target hidden.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from peagle.errors import InputError
from peagle.model.loader import locate
from peagle.model.target import Target, TargetOutput
from peagle.vllm.process import VllmFailed, environment

SCRIPT = Path(__file__).with_name("states_script.py")
WINDOW = 16_384  # tokens of the documents that are handed over together
FILES, LOG = ".vllm", "vllm.log"  # in the folder of the capture
SECONDS = 20  # for vLLM to end by itself


@dataclass(frozen=True, slots=True)
class Vllm:
    """How vLLM is run."""

    python: Path  # an interpreter that has it
    tensor_parallel: int = 1  # GPUs the target is split over


def tokens_in_passing(target: Target, documents: list[list[int]]) -> int:
    """Tokens whose files lie on the disk at once, at most. Raises InputError for documents longer
    than the target's context, beyond which vLLM does not run it."""
    longest = max(map(len, documents))
    if longest > target.max_context:
        raise InputError(
            f"max_length: a document has {longest} tokens, vLLM runs {target.name} over at most "
            f"{target.max_context}: give --max-length {target.max_context}"
        )
    return min(sum(map(len, documents)), 2 * max(longest, WINDOW))


def through_vllm(
    vllm: Vllm, target: Target, feature_layers: tuple[int, ...], output: Path
) -> Callable[[list[list[int]]], Generator[TargetOutput]]:
    """The target run by vLLM. Of `target` itself only the last norm is computed, in this process.

    What it returns takes documents' token ids and raises VllmFailed. `output` is the folder of
    the capture.
    """
    norm = target.last_norm()

    @torch.no_grad()
    def read(file: Path, ids: list[int]) -> TargetOutput:
        try:
            said = load_file(file)
        except SafetensorError as error:
            raise VllmFailed(f"vLLM's file cannot be read ({error}): is the disk full?") from error
        file.unlink()
        states = said["hidden_states"]  # (N, F + 1, E)
        shape = (len(ids), len(feature_layers) + 1, target.config.hidden_size)
        if said["token_ids"].tolist() != ids or states.shape != shape:
            raise VllmFailed(f"vLLM ran other tokens or layers than it was given ({file.name})")
        # A copy: a view would keep the file's bytes on the disk.
        return TargetOutput(norm(states[:, -1]), states[:, :-1].flatten(1).clone())

    def run(documents: list[list[int]]) -> Generator[TargetOutput]:
        windows, number = _windows(documents), 0
        llm = _arguments(vllm, target, feature_layers, max(map(len, documents)))
        with closing(_Process(vllm.python, llm, output)) as process:
            process.send(windows[0])
            for window, following in zip(windows, [*windows[1:], []], strict=True):
                if following:
                    process.send(following)
                process.wait()
                for ids in window:
                    yield read(process.files / f"{number}.safetensors", ids)
                    number += 1

    return run


def _windows(documents: list[list[int]]) -> list[list[list[int]]]:
    """As many documents each as WINDOW tokens hold, at least one."""
    windows: list[list[list[int]]] = []
    filled = WINDOW
    for ids in documents:
        if filled + len(ids) > WINDOW:
            windows.append([])
            filled = 0
        windows[-1].append(ids)
        filled += len(ids)
    return windows


def _arguments(
    vllm: Vllm, target: Target, feature_layers: tuple[int, ...], longest: int
) -> dict[str, Any]:
    """Of `vllm.LLM`; the script adds where files go."""
    path, revision = locate(target.name)
    layers = [*feature_layers, len(target.layers)]  # the last is what leaves the last layer
    return {
        "model": path,
        "revision": revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tensor_parallel_size": vllm.tensor_parallel,
        "max_model_len": longest + 1,  # vLLM answers every document with a token
        "enforce_eager": True,  # nothing is decoded
        "enable_prefix_caching": False,  # every document has states of its own
        "seed": 0,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
    }


class _Process:
    """vLLM's process: windows of documents go in, files come out in their order."""

    def __init__(self, python: Path, llm: dict[str, Any], output: Path) -> None:
        self.files, self.log, self.failed = output / FILES, output / LOG, False
        shutil.rmtree(self.files, ignore_errors=True)  # of a run that was killed
        self.files.mkdir()
        more = {
            # A document's file is written in the step after its last: only the worker process goes
            # on stepping.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            # The token behind a document as long as the context is sampled, never run.
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, SCRIPT, self.files.absolute(), json.dumps(llm)],
                env=environment(**more),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # its workers end with it
            )

    def send(self, window: list[list[int]]) -> None:
        """Hand documents over."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(window) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def wait(self) -> None:
        """Until the files of the next window are there."""
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise self._failure()

    def _failure(self) -> VllmFailed:
        self.failed = True
        code = self.process.wait()
        last = (self.log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
        return VllmFailed(f"vLLM ended with code {code}: {last} (all it said is in {self.log})")

    def close(self) -> None:
        """End it: when its input ends it does so by itself."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.files, ignore_errors=True)
        if not self.failed:
            self.log.unlink()
