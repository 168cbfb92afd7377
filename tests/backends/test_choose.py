"""The choice of a backend; the log names the reason for the slow one."""

import pytest
import torch

from peagle.backends import choose
from peagle.backends.choose import choose_backend
from peagle.backends.cpu.library import NoCompiler
from peagle.backends.torch import TorchBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float16), ("cpu", torch.float64), ("meta", torch.float32)]
)
def test_only_the_reference_runs_every_dtype_and_device(
    device: str, dtype: torch.dtype, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = choose_backend(torch.device(device), dtype, exact=exact)
    assert isinstance(found, TorchBackend) and found.exact == exact
    assert caplog.messages == [f"slower: no backend but the reference for {dtype} on {device}"]


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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
    found = choose_backend(CPU, dtype, exact=exact)
    assert found.exact == exact  # type: ignore[attr-defined]
    assert (found.name == "torch") == bool(caplog.messages), "where nothing can be compiled"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(*_: object, **__: object) -> None:
        raise NoCompiler("no C++ compiler: install g++")

    monkeypatch.setattr("peagle.backends.cpu.backend.CpuBackend", refused)
    found = choose_backend(CPU, torch.float32, exact=True)
    assert isinstance(found, TorchBackend) and found.exact
    assert caplog.messages == ["slower without native code: no C++ compiler: install g++"]
