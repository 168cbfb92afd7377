"""Runs the target of a capture in a vLLM process, on one or several GPUs.

vLLM extracts the inputs of the feature layers and the output of the last layer, and writes a file
per document. The files are read and deleted as they come, so at most two windows of documents are
on the disk: one is read while the next one is made.

Shapes: N tokens of a document, F feature layers, E target hidden.
"""

import json
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from peagle.errors import InputError
from peagle.locks import held
from peagle.model.attention import CausalAttend
from peagle.model.loader import locate
from peagle.model.partial import outline
from peagle.model.target import Target, TargetOutput
from peagle.vllm.process import Process, VllmFailed, environment, look, prepend

SCRIPT = str(Path(__file__).with_name("capture_script.py"))
WINDOW = 16_384  # tokens of the documents that are sent together, but for the end of the last one
ENVIRONMENT = {
    # A document's file is written in the step after its last: only the worker process goes on
    # stepping.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # for every method: only V1 drafts in parallel
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, for target and drafter together
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    # The token after a document as long as the context is sampled, never run.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
CONNECTOR = {"kv_connector": "ExampleHiddenStatesConnector"}
CPU_CONNECTOR = {"kv_connector": "CpuConnector", "kv_connector_module_path": "cpu_connector"}


@dataclass(frozen=True, slots=True)
class Vllm:
    """Settings of the vLLM process."""

    python: Path  # an interpreter that has it
    tensor_parallel: int = 1  # GPUs the target is split over


def tokens_in_passing(lengths: list[int]) -> int:
    """Return the maximum tokens, of documents of these lengths, whose files are on the disk at
    once."""
    return min(sum(lengths), 2 * (WINDOW + max(lengths)))


def through_vllm(
    vllm: Vllm, target: Target, feature_layers: tuple[int, ...], output: Path, part: int = 1
) -> Callable[[Sequence[list[int]]], Generator[TargetOutput]]:
    """Run the target by vLLM. Of `target` itself only the last norm is computed, in this process.

    What it returns takes documents' token ids and raises VllmFailed, or InputError while another
    process makes the same part. `output` is the folder of the capture, of which this is a `part`;
    vLLM's log is put there when it fails.
    """
    norm = last_norm(target)
    # The last id is the output of the last layer; it may be a feature, and vLLM returns it once.
    layers = sorted({*feature_layers, target.num_layers})

    @torch.no_grad()
    def read(file: Path, ids: list[int]) -> TargetOutput:
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise VllmFailed(f"vLLM's file cannot be read ({error}): is the disk full?") from error
        file.unlink()
        states = tensors["hidden_states"]  # (N, F + 1, E), or (N, F, E)
        shape = (len(ids), len(layers), target.config.hidden_size)
        if tensors["token_ids"].tolist() != ids or states.shape != shape:
            raise VllmFailed(f"vLLM ran other tokens or layers than it was given ({file.name})")
        # A copy: a view would keep the file's bytes on the disk.
        features = states[:, : len(feature_layers)].flatten(1).clone()
        return TargetOutput(norm(states[:, -1]), features)

    def run(documents: Sequence[list[int]]) -> Generator[TargetOutput]:
        files = (output / f".vllm-{part}").absolute()
        kept = output / f"vllm-{part}.log"
        arguments = {
            "tensor_parallel_size": vllm.tensor_parallel,
            "max_model_len": max(map(len, documents)) + 1,  # every document is answered by a token
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
            },
        }
        files.mkdir(exist_ok=True)
        with held(files):
            for left in files.iterdir():  # by a run that was killed
                left.unlink(missing_ok=True)
            kept.unlink(missing_ok=True)  # left by a run that failed
            try:
                with closing(_start(vllm.python, target, arguments, files)) as process:
                    for ids, file in zip(documents, _files(process, documents), strict=True):
                        yield read(file, ids)
            except VllmFailed as error:
                raise VllmFailed(f"{error} (its log is {process.log.rename(kept)})") from error
            finally:
                shutil.rmtree(files, ignore_errors=True)

    return run


@torch.no_grad()
def last_norm(target: Target) -> nn.Module:
    """The module that makes `TargetOutput.hidden` of the stream that leaves the last layer.

    It is found by one token, without weights where `target` has none: the part of the decoder that
    ran last. Raises InputError for decoders that do anything else after their layers.
    """
    whole = target if target.runs else outline(target.name)
    left = list[Tensor]()
    ran = list[tuple[nn.Module, Tensor, Tensor]]()

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        ran.append((module, args[0], out) if args else (module, out, out))

    hooks = [part.register_forward_hook(note) for part in whole.decoder.children()]
    hooks.append(whole.layers[-1].register_forward_hook(lambda _, __, out: left.append(out)))
    try:
        ids = torch.zeros(1, dtype=torch.int64, device=whole.device)
        hidden = whole.forward(ids, ids, CausalAttend()).hidden
    finally:
        for hook in hooks:
            hook.remove()
    norm, given, made = ran[-1]
    same = made.untyped_storage()._cdata == hidden.untyped_storage()._cdata
    if given is not left[0] or not same:
        kind = type(target.decoder).__name__
        why = f"its {kind} has no single norm after the last layer"
        raise InputError(why, field="target", value=target.name)
    name = next(name for name, part in whole.decoder.named_children() if part is norm)
    return cast(nn.Module, target.decoder.get_submodule(name))


def _start(python: Path, target: Target, arguments: Mapping[str, Any], files: Path) -> Process:
    """Start the script with these arguments of vllm.LLM, to write into the folder `files`, where
    its log is, too; its docstring describes the messages."""
    path, revision = locate(target.name)
    installed = look(python)
    llm = {
        "model": path,
        "revision": revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "enforce_eager": True,  # compiling would take longer than the run
        "enable_prefix_caching": False,
        "seed": 0,
        "kv_transfer_config": {
            **(CPU_CONNECTOR if installed.cpu else CONNECTOR),
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(files)},
        },
        **arguments,
    }
    environ = environment(ENVIRONMENT)
    prepend(environ, "PATH", installed.prefix / "bin")  # ninja, which FlashInfer runs
    return Process([str(python), SCRIPT, json.dumps(llm)], environ, files / "vllm.log")


def _files(process: Process, documents: Sequence[list[int]]) -> Iterator[Path]:
    """The files of all documents in their order. While a window's are read, the next one runs. It
    is sent when the script waits for it: if both wrote, both could wait for the other to read."""
    files = list[str]()
    window = list[list[int]]()
    for number, ids in enumerate(documents, 1):
        window.append(ids)
        if number == len(documents) or sum(map(len, window)) >= WINDOW:
            process.send(window)
            yield from map(Path, files)
            files = process.receive()
            window = []
    yield from map(Path, files)
