"""Two processes train as one. (Runs that are killed: attacks/test_killed_training.py.)"""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from processes import assert_near, metrics, run, start, state, torchrun

from peagle.train.processes import make_accelerator


@pytest.mark.parametrize(
    ("name", "first"), [("cuda:1", "set_device"), ("cuda", "Accelerator"), ("cpu", "Accelerator")]
)
def test_the_gpu_that_is_named_becomes_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: str
) -> None:
    """A single process of accelerate takes that, whatever its number."""
    called = Mock()
    monkeypatch.setattr("torch.cuda.set_device", called.set_device)
    monkeypatch.setattr("peagle.train.processes.Accelerator", called.Accelerator)
    device = torch.device(name)
    make_accelerator(device, tmp_path, None)
    assert called.mock_calls[0][0] == first
    assert called.Accelerator.call_args.kwargs["cpu"] == (name == "cpu")
    if first == "set_device":
        called.set_device.assert_called_once_with(device)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "launch"), [("p-eagle", torchrun), ("eagle3", run)])
def test_two_equal_one(tmp_path: Path, method: str, launch: Callable[..., object]) -> None:
    """Same global batch, partitioned differently often a process: same losses, same weights."""
    settings = {"method": method, "steps": 5, "batch": 4, "pack": 60, "segments": 3, "bf16": False}
    run(tmp_path / "1", **settings)
    launch(tmp_path / "2", 2, **settings)
    one, two = (metrics(tmp_path / str(count)) for count in (1, 2))
    assert [m["step"] for m in two] == [1, 2, 3, 4, 5], "process 0 alone writes"
    assert [m["processes"] for m in one + two] == [1] * 5 + [2] * 5
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-3)
        assert (a["answer_tokens"], a["accuracy"]) == (b["answer_tokens"], b["accuracy"])
    assert_near(state(tmp_path / "1"), state(tmp_path / "2"))


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both(tmp_path: Path) -> None:
    """After the same step, or one would wait for the other."""
    started = start(tmp_path, 2, steps=50, batch=2, stop=3)
    for process in started:
        process.join(120)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()  # one that waits would do so for ever
    assert codes == [0, 0]
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3, 4]
