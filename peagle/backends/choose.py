"""The choice of a backend, made once, by device and dtype, and targets as it wants them. No other
part of an LLM imports a backend's modules.

Only code that has run on its hardware is chosen: CUDA's on an H200, the CPU's on x86-64, for ARM in
an emulator (docs/status.md).
"""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from peagle.backends.base import Backend
from peagle.backends.cpu import library
from peagle.backends.torch import TorchBackend
from peagle.errors import InputError
from peagle.model.base_target import BaseTarget
from peagle.model.describe import describe_target
from peagle.model.loader import described_target, load_target, resolve_device

CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)


def choose_backend(device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> Backend:
    """The fastest backend for models on `device` in `dtype`; one line in the log gives the
    reason for the reference. `exact`: no row of a target depends on the other rows of a batch."""
    why = f"slower: no backend but the reference for {dtype} on {device.type}"
    if device.type == "cuda" and dtype in CUDA_DTYPES:
        if find_spec("triton"):
            return _module("cuda.backend").CudaBackend(exact=exact)
        why = "slower without Triton's kernels: pip install triton"
    elif device.type == "cpu" and dtype in library.DTYPES:
        try:
            keep = _module("cpu.packed").keep_packed
            return _module("cpu.backend").CpuBackend(describe_target, keep, exact=exact)
        except library.NoCompiler as error:
            why = f"slower without native code: {error}"
    log.warning(why)
    return TorchBackend(exact=exact)


def read_target(
    name: str, kind: str | None, *, native: bool, dtype: str = "auto", device: str = "auto"
) -> BaseTarget:
    """A target by its description, where `native` code runs it; else transformers' model.
    `kind`: "int8" or "int4" weights of its layers. Raises InputError as `load_target` does, and
    where there is no such quantisation."""
    device = resolve_device(device)
    if kind is not None:
        _module("cpu.quantized").check_quantize(kind, device)
    try:
        if native and device == "cpu" and dtype in ("auto", "float32", "bfloat16"):
            library.load()
            # transformers' model names the products that int4 does not fit.
            group = _module("cpu.matrix").GROUP if kind == "int4" else 1
            if described := described_target(name, dtype, kind, group):
                return described
    except library.NoCompiler as error:
        if kind is not None:
            why = f"needs native code: {error}"
            raise InputError(why, field="quantize", value=kind) from error
    target = load_target(name, dtype=dtype, device=device)
    if kind is not None:
        _module("cpu.quantized").quantize(target, kind)
    return target


def _module(name: str) -> Any:
    """A module of a backend: CUDA's needs triton, the CPU's compiles at first use."""
    return import_module(f"peagle.backends.{name}")
