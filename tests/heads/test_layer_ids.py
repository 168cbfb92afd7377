"""Heads whose layer ids may be counted in two ways are tried, and what a record says is not."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import features_of, make_drafter, make_target, random_prompts, save_target

from peagle.heads.format import read_keys
from peagle.heads.load import TEXT, load_drafter
from peagle.heads.save import save_drafter
from peagle.methods.keys import LAYER_IDS
from peagle.model.attention import CausalAttend
from peagle.model.drafter import Drafter
from peagle.model.loader import described_target
from peagle.model.target import Target
from peagle.tools.doctor import examine, verdict
from peagle.vllm.head import check_sizes, target_config

LAYERS = 6
IDS = [1, 2, 4]  # as the head's config.json has them
OURS = {"method": "eagle3", "embedding": "shared"}
ENTERS, LEAVES = (1, 2, 4), (2, 3, 5)  # what they may mean, as we count
Heads = dict[tuple[int, ...], Path]  # by the layers that they were trained on


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(layers=LAYERS, spread=0.3)


def trained_on(target: Target, method: str, layers: tuple[int, ...]) -> Drafter:
    """A head that was taught to predict the target from these layers, on a few texts."""
    drafter = make_drafter(target, method, draft_vocab=len(target.embedding))
    drafter.config = replace(drafter.config, feature_layers=layers)
    assert target.tokenizer is not None
    texts = [target.tokenizer(TEXT.read_text())["input_ids"][:200], *random_prompts(2, 60)]
    optimizer = torch.optim.Adam(drafter.parameters(), 1e-2)
    for step in range(120):
        ids = texts[step % len(texts)]
        tokens, places = torch.tensor(ids), torch.arange(len(ids))
        features = features_of(target, drafter, ids)
        wanted = target.logits(target.forward(tokens, places, CausalAttend()).hidden[1:])
        projected = drafter.project(features[:-1])
        normed = drafter(tokens[1:], projected, places[:-1], CausalAttend()).normed
        found = drafter.logits(normed)
        loss = F.kl_div(found.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@pytest.fixture(scope="module", params=["eagle3", "p-eagle"])
def heads(
    request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Heads:
    """Heads of others with the same ids, nested only."""
    folders = {}
    for layers in (ENTERS, LEAVES):
        folders[layers] = tmp_path_factory.mktemp("head") / "head"
        drafter = trained_on(target, request.param, layers)
        drafter.share_embedding(target.embedding)
        save_drafter(drafter, folders[layers], "vllm", dtype=None)
        change(folders[layers], peagle=None, **{LAYER_IDS: None})
    return folders


def change(folder: Path, **keys: Any) -> None:
    """Set keys of config.json, None removes; the nested ids are IDS."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | keys
    raw["eagle_config"][LAYER_IDS] = IDS
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize("layers", [ENTERS, LEAVES], ids=["enters", "leaves"])
def test_the_reading_that_accepts_more_is_taken(
    target: Target, heads: Heads, layers: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert load_drafter(heads[layers], target).config.feature_layers == layers
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    line = record.getMessage()
    assert str(heads[layers]) in line and "eagle_config" in line
    assert all(str(list(each)) in line for each in (ENTERS, LEAVES))


@pytest.mark.parametrize("layers", [ENTERS, LEAVES], ids=["enters", "leaves"])
def test_doctor_names_what_to_write(target: Target, heads: Heads, layers: tuple[int, ...]) -> None:
    checks = examine(heads[layers], target)
    [found] = [check for check in checks if check.name == "feature layers"]
    assert found.state == "wrong" and all(str(list(each)) in found.found for each in heads)
    assert f"write {list(layers)} as {LAYER_IDS}" in verdict(checks)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({LAYER_IDS: list(ENTERS)}, ENTERS),
        ({LAYER_IDS: list(LEAVES)}, LEAVES),
        ({"peagle": OURS}, ENTERS),
        ({"peagle": OURS | {"provenance": {"feature_layers": IDS}}}, ENTERS),
    ],
)
def test_a_record_or_ids_at_the_top_decide(
    target: Target,
    keys: dict[str, Any],
    wanted: tuple[int, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = make_drafter(target, "eagle3")
    save_drafter(drafter, tmp_path / "head", "vllm", dtype=None)
    change(tmp_path / "head", **({"peagle": None, LAYER_IDS: None} | keys))
    assert load_drafter(tmp_path / "head", target).config.feature_layers == wanted
    assert caplog.records == []


def test_a_reading_that_the_target_has_no_layer_for_is_not_tried(tmp_path: Path) -> None:
    """Ids up to the number of layers can only be what enters (NVIDIA's EAGLE-3 v3 heads)."""
    target = make_target(layers=4)
    save_drafter(make_drafter(target, "eagle3"), tmp_path / "head", "vllm", dtype=None)
    change(tmp_path / "head", peagle=None, **{LAYER_IDS: None})
    assert load_drafter(tmp_path / "head", target).config.feature_layers == ENTERS


def test_the_trial_runs_in_the_targets_dtype(heads: Heads, tmp_path: Path) -> None:
    """Ids of a described target are tried on transformers' model, loaded for it."""
    made = make_target(layers=LAYERS, spread=0.3)
    made.model.to(torch.bfloat16)
    described = described_target(str(save_target(made, tmp_path)), "float32")
    assert described is not None
    assert load_drafter(heads[LEAVES], described).config.feature_layers == LEAVES


def test_without_a_tokenizer_it_is_tried_on_other_tokens(target: Target, heads: Heads) -> None:
    silent = Target(target.copy().model, None, "silent")
    assert load_drafter(heads[LEAVES], silent).config.feature_layers in (ENTERS, LEAVES)


def test_an_export_is_read_without_a_trial(
    target: Target, heads: Heads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_drafter(load_drafter(heads[LEAVES], target), tmp_path / "made", "vllm", dtype=None)
    caplog.clear()
    assert load_drafter(tmp_path / "made", target).config.feature_layers == LEAVES
    assert caplog.records == []


def test_vllm_alone_does_not_try(
    target: Target, heads: Heads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given the head as it is: one line says how it reads the ids."""
    target.model.save_pretrained(tmp_path)
    caplog.clear()
    check_sizes(read_keys(heads[LEAVES]), target_config(str(tmp_path)))
    [record] = caplog.records
    assert "eagle_config" in record.getMessage() and "peagle doctor" in record.getMessage()
