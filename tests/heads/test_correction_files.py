"""The correction of a head on disk."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from corrected_heads import corrected
from json_files import change_json, read_json
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_heads import head_config, make_head, provenance_of

from peagle.heads.load import load_drafter
from peagle.heads.save import save_drafter
from peagle.methods.base import Dialect
from peagle.model.config import Embedding
from peagle.model.drafter import Drafter
from peagle.model.target import Target

ABOUT, WEIGHTS = (f"correction/{name}" for name in ("config.json", "model.safetensors"))


def make(target: Target, embedding: Embedding = "mask-row", seed: int = 0) -> Drafter:
    config = head_config(embedding=embedding, provenance=provenance_of(target), depths=4)
    return corrected(make_head(config, seed, target), candidates=5)


@pytest.fixture
def head(target: Target, tmp_path: Path) -> Path:
    save_drafter(make(target), tmp_path / "head")
    return tmp_path / "head"


@pytest.mark.parametrize("dialect", ["native", "vllm", "speculators"])
def test_what_is_written_is_read(target: Target, tmp_path: Path, dialect: Dialect) -> None:
    drafter = make(target)
    save_drafter(drafter, tmp_path / "head", dialect, dtype=None)
    read = load_drafter(tmp_path / "head", target)
    assert read.config.correction == drafter.config.correction
    for name, tensor in drafter.correction.state_dict().items():
        assert torch.equal(read.correction.state_dict()[name], tensor), name
    normed, before = torch.randn(3, 32), torch.tensor([5, 6, 7])
    for mine, theirs in ((drafter, read), (read, drafter)):
        logits = mine.correction.apply_to(mine.logits(normed), normed, mine.embed(before))
        again = theirs.correction.apply_to(theirs.logits(normed), normed, theirs.embed(before))
        torch.testing.assert_close(logits, again)


def test_the_top_folder_is_the_head_without_it(target: Target, head: Path, tmp_path: Path) -> None:
    """Byte for byte: what vLLM reads."""
    config = head_config(embedding="mask-row", provenance=provenance_of(target), depths=4)
    save_drafter(make_head(config, 0, target), tmp_path / "plain")
    for file in (tmp_path / "plain").iterdir():
        assert (head / file.name).read_bytes() == file.read_bytes(), file.name
    names = {file.name for file in (head / "correction").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    about = read_json(head / ABOUT)
    assert about.items() >= {"rank": 8, "candidates": 5, "depths": 4, "dtype": "bfloat16"}.items()
    shutil.rmtree(head / "correction")
    assert load_drafter(head, target).correction is None


def test_files_are_readable_for_all(head: Path) -> None:
    modes = {file.name: file.stat().st_mode & 0o777 for file in head.rglob("*")}
    assert modes.pop("correction") == 0o755
    assert set(modes.values()) == {0o644}


def _other_head(head: Path, target: Target) -> None:
    save_drafter(make(target, seed=3), head.parent / "other")
    shutil.rmtree(head / "correction")
    shutil.copytree(head.parent / "other" / "correction", head / "correction")


def _change(head: Path, **changes: object) -> None:
    change_json(head / ABOUT, **changes)


def _cut(head: Path) -> None:
    file = head / WEIGHTS
    file.write_bytes(file.read_bytes()[:-40])


def _without_a_tensor(head: Path) -> None:
    file = head / WEIGHTS
    tensors = load_file(file)
    del tensors["token.weight"]
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_other_head, "correction: it was trained with another head: digest .*remove correction/"),
        (lambda head, _: _change(head, rank=9), r"correction.state.weight.*\[8, 32\]"),
        (lambda head, _: _change(head, rank=None), "missing 'rank'"),
        (lambda head, _: _change(head, candidates=0), r"correction\.candidates 0: must be"),
        (lambda head, _: _cut(head), "head/correction: model.safetensors is a corrupt"),
        (lambda head, _: _without_a_tensor(head), "correction.token.weight is missing"),
        (lambda head, _: (head / ABOUT).unlink(), "no correction/config.json"),
        (lambda head, _: (head / ABOUT).write_text("["), "correction/config.json is no JSON"),
        (lambda head, _: (head / WEIGHTS).unlink(), "head/correction: no .safetensors file"),
    ],
)
def test_damage_is_named(
    target: Target, head: Path, damage: Callable[[Path, Target], None], why: str
) -> None:
    damage(head, target)
    with refused("head") as error:
        load_drafter(head, target)
    assert re.search(why, str(error.value))
