"""A run on disk: what is read is what was written. (Damage: attacks/test_damaged_resume.py.)"""

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from tiny import make_drafter

from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.optimizer import Average
from peagle.train.resume import forget_after, newest_checkpoint, restore
from peagle.train.state import (
    Progress,
    append_line,
    checkpoints,
    checksum,
    save_checkpoint,
    snapshot,
)

PROGRESS = Progress(3, 40, 1.5, 1.25, 2)


def optimizer_of(drafter: Drafter, steps: int = 0) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        for parameter in drafter.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def save(run: Path, drafter: Drafter, optimizer: torch.optim.AdamW, step: int) -> None:
    tensors = snapshot(drafter, optimizer, Average(drafter))
    save_checkpoint(run, tensors, replace(PROGRESS, step=step), keep=2)


def load(run: Path, drafter: Drafter, optimizer: torch.optim.AdamW) -> Progress:
    found = newest_checkpoint(run)
    restore(found, drafter, optimizer, Average(drafter))
    return found.progress


def saved(tmp_path: Path, target: Target) -> tuple[Path, Drafter, torch.optim.AdamW]:
    """The run's folder, and what its checkpoint holds."""
    drafter = make_drafter(target, "p-eagle")
    optimizer = optimizer_of(drafter, 3)
    save(tmp_path / "run", drafter, optimizer, PROGRESS.step)
    return tmp_path / "run", drafter, optimizer


def test_round_trip(tmp_path: Path, target: Target) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    other = make_drafter(target, "p-eagle", seed=5)
    fresh = optimizer_of(other)
    assert load(run, other, fresh) == PROGRESS
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for mine, theirs in zip(drafter.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == fresh.state[theirs].keys()
        for kind, value in optimizer.state[mine].items():
            assert torch.equal(value, fresh.state[theirs][kind]), kind
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000003"], "nothing else"


def test_the_newest_are_kept_and_the_newest_is_read(tmp_path: Path, target: Target) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    for step in (9, 10, 200):
        save(run, drafter, optimizer, step)
    assert [p.name for p in checkpoints(run)] == ["step-00000010", "step-00000200"]
    assert load(run, drafter, optimizer).step == 200


def test_what_a_kill_left_is_not_read_and_goes(tmp_path: Path, target: Target) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    half = run / "checkpoints" / ".making"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    assert load(run, drafter, optimizer) == PROGRESS
    save(run, drafter, optimizer, 4)
    assert [p.name for p in checkpoints(run)] == ["step-00000003", "step-00000004"]
    assert not half.exists()


def test_no_checkpoint(tmp_path: Path) -> None:
    with refused("resume"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("changes", [{"layers": 3}, {"layers": 1}, {"draft_vocab": 50}, "eagle3"])
def test_other_settings(tmp_path: Path, target: Target, changes: Any) -> None:
    run, _, _ = saved(tmp_path, target)
    method, more = ("eagle3", {}) if changes == "eagle3" else ("p-eagle", changes)
    other = make_drafter(target, method, **more)
    weights = {name: t.clone() for name, t in other.state_dict().items()}
    with refused() as caught:
        load(run, other, optimizer_of(other))
    assert "there and" in caught.value.why and "settings" in str(caught.value.fix)
    assert all(torch.equal(t, weights[name]) for name, t in other.state_dict().items())


def test_a_checkpoint_of_another_version(tmp_path: Path, target: Target) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    [folder] = checkpoints(run)
    (folder / "progress.json").write_text('{"step": 3, "epoch": 1}')
    files = (folder / "progress.json", folder / "state.safetensors")
    (folder / "SHA256SUMS").write_text("".join(f"{checksum(file)}\n" for file in files))
    with refused() as caught:
        load(run, drafter, optimizer)
    assert "of another version" in caught.value.why


def test_a_checkpoint_that_was_saved_with_infinite_values(tmp_path: Path, target: Target) -> None:
    """By a run that ended when its loss was no number: the one before is good."""
    run, drafter, optimizer = saved(tmp_path, target)
    with torch.no_grad():
        drafter.norm.weight[0] = float("inf")
    save(run, drafter, optimizer, 9)
    older, newest = checkpoints(run)
    with refused() as caught:
        load(run, drafter, optimizer)
    assert "norm.weight" in caught.value.why
    assert caught.value.fix == f"delete {newest} to resume from {older.name}"


def test_sha256sum_checks_a_checkpoint(tmp_path: Path, target: Target) -> None:
    [folder] = checkpoints(saved(tmp_path, target)[0])
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)


def test_only_safetensors_and_json(tmp_path: Path, target: Target) -> None:
    folder = checkpoints(saved(tmp_path, target)[0])[0]
    names = {path.name for path in folder.iterdir()}
    assert names == {"SHA256SUMS", "progress.json", "state.safetensors"}
    kinds = {name.split("/")[0] for name in load_file(folder / "state.safetensors")}
    assert kinds == {"weights", "exp_avg", "exp_avg_sq", "average"}


def test_a_checkpoint_has_the_modes_of_other_files(tmp_path: Path, target: Target) -> None:
    before = os.umask(0o027)
    try:
        run = saved(tmp_path, target)[0]
        append_line(run / "metrics.jsonl", {"step": 1})
        forget_after(run / "metrics.jsonl", 1)
    finally:
        os.umask(before)
    modes = {stat.filemode(path.stat().st_mode) for path in run.rglob("*")}
    assert modes == {"drwxr-x---", "-rw-r-----"}


def test_forget_after(tmp_path: Path) -> None:
    """Lines of steps that will be done again go, and a line that a kill cut."""
    file = tmp_path / "metrics.jsonl"
    forget_after(file, 3)
    assert not file.exists()
    for step in (1, 2, 3):
        append_line(file, {"step": step})
    with file.open("a") as half:
        half.write('{"step": 4, "lo')
    forget_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    file.write_text('{"step": 1}\n?\n')
    with refused():
        forget_after(file, 2)
    assert file.read_text() == '{"step": 1}\n?\n'
