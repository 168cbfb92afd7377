"""`peagle doctor`: the table, the verdict, the exit code."""

import json
import shutil
from pathlib import Path

import pytest
from json_files import change_json
from runner import invoke


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_healthy_head(target: Path, heads: dict[str, Path], method: str) -> None:
    shown = invoke("doctor", heads[method], target).stdout
    rows = [line.split("│")[1:3] for line in shown.splitlines() if "│" in line]
    states = {name.strip(): state.strip() for name, state in rows if name.strip()}
    assert states["features"] == states["logits"] == states["provenance"] == "ok"
    assert states["mask token"] == ("ok" if method == "p-eagle" else "skipped")
    last = shown.splitlines()[-1]
    assert last.startswith("nothing differs in ")
    assert states["acceptance"] in {"ok", "warning"}, "it was hardly trained"
    assert ("; warning: acceptance: " in last) == (states["acceptance"] == "warning")


def test_a_damaged_head_exits_1(target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    head = shutil.copytree(heads["p-eagle"], tmp_path / "head")
    change_json(head / "config.json", ptd_token_id=40)
    done = invoke("doctor", head, target, code=1)
    assert done.stdout.splitlines()[-1].startswith("mask token: ptd_token_id 40: is an ordinary")
    report = json.loads(invoke("doctor", head, target, "--json", code=1).stdout)
    assert report["healthy"] is False and report["verdict"].startswith("mask token: ")
    assert {"name", "state", "found", "fix"} == set(report["checks"][0])


def test_force_accepts_another_target(other_target: Path, heads: dict[str, Path]) -> None:
    shown = invoke("doctor", heads["p-eagle"], other_target, code=1).stdout
    assert "provenance: trained for" in shown and "use --force" in shown
    shown = invoke("doctor", heads["p-eagle"], other_target, "--force").stdout
    assert "forced" in shown and "nothing differs" in shown


@pytest.mark.parametrize(
    ("head", "options", "field"), [("./nowhere", (), "head"), (None, ("--dtype", "int3"), "dtype")]
)
def test_refusals(refused, target: Path, heads: dict[str, Path], head, options, field) -> None:
    refused("doctor", head or heads["p-eagle"], target, *options, field=field)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        (("--dtype", "float32"), "dtype"),
        (("--chat-template", "plain"), "chat_template"),
        (("--force",), "force"),
    ],
)
def test_options_that_need_a_target(refused, target: Path, option, field: str) -> None:
    assert refused("doctor", target, *option, field=field).endswith("; leave it out")


def test_a_home_that_is_none(refused) -> None:
    assert "unknown model" in refused("doctor", "~no-such-user/x", field="target")


def test_a_folder_that_is_no_head(refused, target: Path, tmp_path: Path) -> None:
    assert "no config.json" in refused("doctor", tmp_path, target)
