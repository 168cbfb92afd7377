"""A run on disk: what is read back is what was written; what cannot be read is named in a line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_drafter, make_target

from peagle.config import InputError
from peagle.model.drafter import Drafter
from peagle.model.target import Target
from peagle.train.state import append_line, load_checkpoint, save_checkpoint

PROGRESS = {"step": 3, "answer_tokens": 40, "seconds": 1.5}


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


def saved(tmp_path: Path, target: Target) -> tuple[Path, Drafter, torch.optim.AdamW]:
    drafter = make_drafter(target, "p-eagle")
    optimizer = optimizer_of(drafter, 3)
    save_checkpoint(tmp_path / "run" / "checkpoint", drafter, optimizer, PROGRESS)
    return tmp_path / "run" / "checkpoint", drafter, optimizer


def test_round_trip(tmp_path: Path, target: Target) -> None:
    folder, drafter, optimizer = saved(tmp_path, target)
    other = make_drafter(target, "p-eagle", seed=5)
    fresh = optimizer_of(other)
    assert load_checkpoint(folder, other, fresh) == PROGRESS
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for mine, theirs in zip(drafter.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == fresh.state[theirs].keys()
        for kind, value in optimizer.state[mine].items():
            assert torch.equal(value, fresh.state[theirs][kind]), kind
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"], "no temporary folder stays"


def test_saving_again_replaces(tmp_path: Path, target: Target) -> None:
    folder, drafter, optimizer = saved(tmp_path, target)
    save_checkpoint(folder, drafter, optimizer, {**PROGRESS, "step": 9})
    assert json.loads((folder / "progress.json").read_text())["step"] == 9
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("changes", [{"layers": 3}, {"layers": 1}, {"draft_vocab": 50}])
def test_other_settings(tmp_path: Path, target: Target, changes: dict[str, int]) -> None:
    folder, _, _ = saved(tmp_path, target)
    other = make_drafter(target, "p-eagle", **changes)  # type: ignore[arg-type]
    weights = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(InputError, match="made with other settings") as caught:
        load_checkpoint(folder, other, optimizer_of(other))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert all(torch.equal(t, weights[name]) for name, t in other.state_dict().items())


def test_another_method(tmp_path: Path, target: Target) -> None:
    folder, _, _ = saved(tmp_path, target)
    other = make_drafter(target, "eagle3")
    with pytest.raises(InputError, match="mask_embedding is .* there and absent now"):
        load_checkpoint(folder, other, optimizer_of(other))


@pytest.mark.parametrize("broken", ["state.safetensors", "progress.json"])
@pytest.mark.parametrize("how", ["absent", "corrupt"])
def test_unreadable(tmp_path: Path, target: Target, broken: str, how: str) -> None:
    folder, drafter, optimizer = saved(tmp_path, target)
    if how == "absent":
        (folder / broken).unlink()
    else:
        (folder / broken).write_bytes(b"{no")
    with pytest.raises(InputError, match="cannot be read") as caught:
        load_checkpoint(folder, drafter, optimizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{}", "[3]"])
def test_progress_without_a_step(tmp_path: Path, target: Target, content: str) -> None:
    folder, drafter, optimizer = saved(tmp_path, target)
    (folder / "progress.json").write_text(content)
    with pytest.raises(InputError, match="cannot be read"):
        load_checkpoint(folder, drafter, optimizer)


def test_only_safetensors_and_json(tmp_path: Path, target: Target) -> None:
    folder, _, _ = saved(tmp_path, target)
    assert sorted(p.name for p in folder.iterdir()) == ["progress.json", "state.safetensors"]
    tensors = load_file(folder / "state.safetensors")
    save_file(tensors, folder / "state.safetensors")
    assert {name.split("/")[0] for name in tensors} == {"weights", "exp_avg", "exp_avg_sq"}


def test_append_line(tmp_path: Path) -> None:
    for step in (1, 2):
        append_line(tmp_path / "metrics.jsonl", {"step": step})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
