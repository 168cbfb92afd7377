"""The choice of a backend; the log names the reason for the slow one."""

import pytest
import torch

from peagle.backends import choose
from peagle.backends.choose import choose_backend
from peagle.backends.torch import TorchBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_without_a_backend(
    dtype: torch.dtype, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = choose_backend(CPU, dtype, exact=exact)
    assert isinstance(found, TorchBackend) and found.exact == exact
    assert caplog.messages == [f"slower: no backend but the reference for {dtype} on cpu"]


def test_devices_without_a_backend(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend(torch.device("meta"), torch.float32).name == "torch"
    assert caplog.messages == ["slower: no backend but the reference for torch.float32 on meta"]


def test_a_gpu_without_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    assert choose_backend(CUDA, torch.bfloat16).name == "torch"
    assert caplog.messages == ["slower without Triton's kernels: pip install triton"]


@pytest.mark.parametrize("exact", [False, True])
def test_a_gpu(exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is compiled before a model runs."""
    pytest.importorskip("triton")
    found = choose_backend(CUDA, torch.bfloat16, exact=exact)
    assert found.name == "cuda" and found.exact == exact and not caplog.messages  # type: ignore[attr-defined]
    assert choose_backend(CUDA, torch.float64).name == "torch"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu(dtype: torch.dtype, exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("peagle.backends.cpu.backend")
    found = choose_backend(CPU, dtype, exact=exact)
    assert found.exact == exact  # type: ignore[attr-defined]
    assert (found.name == "torch") == bool(caplog.messages), "where nothing can be compiled"


def test_a_cpu_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = pytest.importorskip("peagle.backends.cpu.backend")
    library = pytest.importorskip("peagle.backends.cpu.library")

    def refused(*, exact: bool) -> None:
        raise library.NoCompiler("no C++ compiler: install g++")

    monkeypatch.setattr(backend, "CpuBackend", refused)
    found = choose_backend(CPU, torch.float32, exact=True)
    assert isinstance(found, TorchBackend) and found.exact
    assert caplog.messages == ["slower without native code: no C++ compiler: install g++"]
