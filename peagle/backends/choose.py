"""The choice of a backend, made once, by device and dtype.

Only code that has run on its hardware is chosen: CUDA's on an H200, the CPU's on x86-64, for ARM in
an emulator (docs/status.md).
"""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from peagle.backends.base import Backend
from peagle.backends.cpu.library import NoCompiler
from peagle.backends.cpu.packed import keep_packed
from peagle.backends.torch import TorchBackend
from peagle.model.describe import describe_target

CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)


def choose_backend(device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> Backend:
    """The fastest backend for models on `device` in `dtype`; one line in the log gives the
    reason for the reference. `exact`: no row of a target depends on the other rows of a batch."""
    why = f"slower: no backend but the reference for {dtype} on {device.type}"
    if device.type == "cuda" and dtype in CUDA_DTYPES:
        if find_spec("triton"):
            return _backend_module("cuda").CudaBackend(exact=exact)
        why = "slower without Triton's kernels: pip install triton"
    elif device.type == "cpu" and dtype in CPU_DTYPES:
        try:
            return _backend_module("cpu").CpuBackend(
                exact=exact, describe=describe_target, keep=keep_packed
            )
        except NoCompiler as error:
            why = f"slower without native code: {error}"
    log.warning(why)
    return TorchBackend(exact=exact)


def _backend_module(name: str) -> Any:
    """The module of a backend: CUDA's needs triton, the CPU's compiles at first use."""
    return import_module(f"peagle.backends.{name}.backend")
