"""Sharded processes train as one does; what they leave on disk does not show how many they were."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import assert_near, metrics, state, torchrun
from tiny import METHODS, make_drafter, make_target

from peagle.heads.load import load_drafter
from peagle.train.batches import PackedDocuments
from peagle.train.passes import run_target
from peagle.train.processes import idle_pass, rebuilt
from peagle.train.trainee import Trainee

COMMON = {"steps": 4, "batch": 4, "pack": 60, "segments": 2, "bf16": False, "uneven": True}
COMMON |= {"save_every": 2, "keep": 9, "eval_every": 3}


def launch(folder: Path, processes: int, **settings: Any) -> int:
    """Exit status of a run; processes of one partition their sequences differently often."""
    done = torchrun(folder, processes, **COMMON | settings)
    assert done.returncode == 0 or "kill" in settings, done.stderr[-3000:]
    return done.returncode


def assert_same_run(one: Path, other: Path, *, loss: float = 2e-3, weights: float = 1e-3) -> None:
    """Within rounding."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=loss)
        assert a["accuracy"] == b["accuracy"]
        assert a.get("acceptance_length") == b.get("acceptance_length")
    assert_near(state(one), state(other), weights)


def halfway(run: Path, copy: Path) -> Path:
    """A copy of a run's folder as it was at step 2."""
    shutil.copytree(run, copy)
    for later in ("step-00000004", "step-00000003"):
        shutil.rmtree(copy / "checkpoints" / later, ignore_errors=True)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(("method", "compiled"), [("p-eagle", True), ("eagle3", False)])
def test_sharded_equals_one_process(tmp_path: Path, method: str, compiled: bool) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    launch(one, 1, method=method)
    launch(two, 2, method=method, shard=True, compile=compiled)
    assert_same_run(one, two)
    head = load_drafter(two / "head", make_target())
    for name, tensor in head.state_dict().items():
        trained = state(two).get(f"average/{name}", state(two)[f"weights/{name}"])
        assert torch.equal(tensor, trained.to(torch.bfloat16).to(tensor.dtype)), name


@pytest.mark.slow
def test_two_nodes_equal_one_process(tmp_path: Path) -> None:
    """Sharded in a node of two, replicated over two of them; the same on four in one node."""
    one, four, nodes = tmp_path / "one", tmp_path / "four", tmp_path / "nodes"
    launch(one, 1)
    launch(four, 4, shard=True)
    launch(nodes, 4, shard=True, nodes=2)
    assert_same_run(one, nodes, loss=1e-6, weights=1e-3)
    assert_same_run(four, nodes, loss=1e-6, weights=1e-6)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly_and_in_any_number_of_processes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sharded = {"shard": True, "recompute": True}
    launch(whole, 2, **sharded)
    assert launch(killed, 2, **sharded, kill=3) != 0
    assert not (killed / "done").exists() and len(metrics(killed)) >= 2
    launch(killed, 2, **sharded)
    assert metrics(killed) == metrics(whole)
    first, second = state(whole), state(killed)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    launch(alone := halfway(whole, tmp_path / "alone"), 1)
    assert_same_run(whole, alone)
    launch(again := halfway(alone, tmp_path / "again"), 2, **sharded)
    assert_same_run(whole, again)


@pytest.mark.parametrize("method", METHODS)
def test_an_idle_pass_leaves_zero_gradients_everywhere(method: str) -> None:
    """FSDP sums the gradients that are there: none may be missing in a pass that trains nothing."""
    target = make_target()
    drafter = make_drafter(target, method).train()
    ids = torch.arange(5, 15)
    sequence = PackedDocuments(ids, ids > 6, torch.zeros_like(ids))
    trainee = Trainee(drafter, target)
    output = run_target(target, sequence, drafter.config.feature_layers)
    result = trainee(sequence, output, idle_pass(ids.device))
    result.loss.backward()
    assert (float(result.loss.detach()), int(result.supervised.sum())) == (0, 0)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("method", METHODS)
def test_a_copy_is_the_same_drafter(method: str) -> None:
    target = make_target()
    drafter = make_drafter(target, method).train()
    copied = rebuilt(drafter, drafter.config, drafter.state_dict()).eval()
    assert copied.shared_embedding is not None and drafter.shared_embedding is not None
    assert copied.shared_embedding.data_ptr() == drafter.shared_embedding.data_ptr()
    assert not copied.training
    ours, theirs = drafter.state_dict(), copied.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert all(tensor.data_ptr() != theirs[name].data_ptr() for name, tensor in ours.items())
