"""The choice of a backend, made once, by device and dtype.

Only code that has run on its hardware is chosen: CUDA's on an H200, the CPU's on x86-64, for ARM in
an emulator (docs/status.md).
"""

import logging
from importlib.util import find_spec

import torch

from peagle.backends.base import Backend
from peagle.backends.torch import TorchBackend

CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)


def choose_backend(device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> Backend:
    """The fastest backend for models on `device` in `dtype`; one line in the log gives the
    reason for the reference. `exact`: no row of a target depends on the other rows of a batch."""
    why = f"slower: no backend but the reference for {dtype} on {device.type}"
    if device.type == "cuda" and dtype in CUDA_DTYPES:
        if find_spec("triton"):
            from peagle.backends.cuda.backend import CudaBackend  # noqa: PLC0415 (needs triton)

            return CudaBackend(exact=exact)
        why = "slower without Triton's kernels: pip install triton"
    elif device.type == "cpu" and dtype in CPU_DTYPES:
        from peagle.backends.cpu.backend import CpuBackend  # noqa: PLC0415 (compiles at first use)
        from peagle.backends.cpu.library import NoCompiler  # noqa: PLC0415

        try:
            return CpuBackend(exact=exact)
        except NoCompiler as error:
            why = f"slower without native code: {error}"
    log.warning(why)
    return TorchBackend(exact=exact)
