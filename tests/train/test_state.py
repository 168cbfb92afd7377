"""A run on disk: what is read back is what was written; what cannot be read is named in a line."""

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_drafter, make_target

from peagle.errors import InputError
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.average import Average
from peagle.train.resume import forget_after, load_checkpoint
from peagle.train.state import (
    Progress,
    append_line,
    checkpoints,
    checksum,
    save_checkpoint,
    snapshot,
)

PROGRESS = Progress(3, 40, 1.5, 1.25, 2)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


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


def saved(tmp_path: Path, target: Target) -> tuple[Path, Drafter, torch.optim.AdamW]:
    """The run's folder, and what its checkpoint holds."""
    drafter = make_drafter(target, "p-eagle")
    optimizer = optimizer_of(drafter, 3)
    save_checkpoint(
        tmp_path / "run", snapshot(drafter, optimizer, Average(drafter)), PROGRESS, keep=2
    )
    return tmp_path / "run", drafter, optimizer


def test_round_trip(tmp_path: Path, target: Target) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    other = make_drafter(target, "p-eagle", seed=5)
    fresh = optimizer_of(other)
    assert load_checkpoint(run, other, fresh, Average(other)) == PROGRESS
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
        save_checkpoint(
            run,
            snapshot(drafter, optimizer, Average(drafter)),
            replace(PROGRESS, step=step),
            keep=2,
        )
    assert [p.name for p in checkpoints(run)] == ["step-00000010", "step-00000200"]
    assert load_checkpoint(run, drafter, optimizer, Average(drafter)).step == 200


def test_what_a_kill_left_is_not_read_and_goes(tmp_path: Path, target: Target) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    half = run / "checkpoints" / ".making-abc"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    assert load_checkpoint(run, drafter, optimizer, Average(drafter)) == PROGRESS
    save_checkpoint(
        run, snapshot(drafter, optimizer, Average(drafter)), replace(PROGRESS, step=4), keep=2
    )
    assert [p.name for p in checkpoints(run)] == ["step-00000003", "step-00000004"]
    assert not half.exists()


def test_no_checkpoint(tmp_path: Path, target: Target) -> None:
    drafter = make_drafter(target, "p-eagle")
    with pytest.raises(InputError, match="^resume: no checkpoint in"):
        load_checkpoint(tmp_path, drafter, optimizer_of(drafter), Average(drafter))


@pytest.mark.parametrize("changes", [{"layers": 3}, {"layers": 1}, {"draft_vocab": 50}])
def test_other_settings(tmp_path: Path, target: Target, changes: dict[str, int]) -> None:
    run, _, _ = saved(tmp_path, target)
    other = make_drafter(target, "p-eagle", **changes)  # type: ignore[arg-type]
    weights = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(InputError, match="made with other settings") as caught:
        load_checkpoint(run, other, optimizer_of(other), Average(other))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert all(torch.equal(t, weights[name]) for name, t in other.state_dict().items())


def test_another_method(tmp_path: Path, target: Target) -> None:
    run, _, _ = saved(tmp_path, target)
    other = make_drafter(target, "eagle3")
    with pytest.raises(InputError, match="mask_embedding is .* there and absent now"):
        load_checkpoint(run, other, optimizer_of(other), Average(other))


@pytest.mark.parametrize("broken", ["state.safetensors", "progress.json"])
@pytest.mark.parametrize("how", ["absent", "corrupt"])
def test_unreadable(tmp_path: Path, target: Target, broken: str, how: str) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    folder = checkpoints(run)[0]
    if how == "absent":
        (folder / broken).unlink()
    else:
        (folder / broken).write_bytes(b"{no")
    why = {"absent": "cannot be read", "corrupt": "damaged"}[how]
    with pytest.raises(InputError, match=f"{broken}: {why}") as caught:
        load_checkpoint(run, drafter, optimizer, Average(drafter))
    assert "\n" not in str(caught.value)


def test_damage_is_named_with_the_checkpoint_before(tmp_path: Path, target: Target) -> None:
    """Of many kinds: attacks/test_damaged_resume.py."""
    run, drafter, optimizer = saved(tmp_path, target)
    save_checkpoint(
        run, snapshot(drafter, optimizer, Average(drafter)), replace(PROGRESS, step=9), keep=2
    )
    older, newest = checkpoints(run)
    (newest / "progress.json").write_text("[3]")
    with pytest.raises(InputError) as caught:
        load_checkpoint(run, drafter, optimizer, Average(drafter))
    line = str(caught.value)
    assert line.startswith(f"{newest}/progress.json: damaged")
    assert line.endswith(f": delete {newest} to resume from {older.name}")


def test_a_checkpoint_of_another_version(tmp_path: Path, target: Target) -> None:
    run, drafter, optimizer = saved(tmp_path, target)
    [folder] = checkpoints(run)
    (folder / "progress.json").write_text('{"step": 3, "epoch": 1}')
    files = (folder / "progress.json", folder / "state.safetensors")
    (folder / "SHA256SUMS").write_text("".join(f"{checksum(file)}\n" for file in files))
    with pytest.raises(InputError, match=r"progress.json: of another version \(.*'epoch'"):
        load_checkpoint(run, drafter, optimizer, Average(drafter))


def test_a_checkpoint_that_was_saved_with_infinite_values(tmp_path: Path, target: Target) -> None:
    """By a run that ended when its loss was no number: the one before is good."""
    run, drafter, optimizer = saved(tmp_path, target)
    with torch.no_grad():
        drafter.norm.weight[0] = float("inf")
    save(run, drafter, optimizer, 9)
    older, newest = checkpoints(run)
    with pytest.raises(InputError, match="norm.weight holds values that are not finite") as caught:
        load_checkpoint(run, drafter, optimizer, Average(drafter))
    assert str(caught.value).endswith(f": delete {newest} to resume from {older.name}")


def test_sha256sum_checks_a_checkpoint(tmp_path: Path, target: Target) -> None:
    [folder] = checkpoints(saved(tmp_path, target)[0])
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)


def test_only_safetensors_and_json(tmp_path: Path, target: Target) -> None:
    folder = checkpoints(saved(tmp_path, target)[0])[0]
    assert sorted(p.name for p in folder.iterdir()) == [
        "SHA256SUMS",
        "progress.json",
        "state.safetensors",
    ]
    tensors = load_file(folder / "state.safetensors")
    assert {name.split("/")[0] for name in tensors} == {
        "weights",
        "exp_avg",
        "exp_avg_sq",
        "average",
    }


def test_whoever_may_read_other_files_may_read_these(tmp_path: Path, target: Target) -> None:
    before = os.umask(0o027)
    try:
        run = saved(tmp_path, target)[0]
        append_line(run / "metrics.jsonl", {"step": 1})
        forget_after(run / "metrics.jsonl", 1)
    finally:
        os.umask(before)
    modes = {stat.filemode(path.stat().st_mode) for path in run.rglob("*")}
    assert modes == {"drwxr-x---", "-rw-r-----"}


def test_append_line(tmp_path: Path) -> None:
    for step in (1, 2):
        append_line(tmp_path / "metrics.jsonl", {"step": step})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_forget_after(tmp_path: Path) -> None:
    """What will be done again is forgotten, and a line that a kill cut."""
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
    with pytest.raises(InputError, match="2: not a record of a step: remove line 2"):
        forget_after(file, 2)
    assert file.read_text() == '{"step": 1}\n?\n'
