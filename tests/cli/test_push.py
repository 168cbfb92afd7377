"""`peagle push`, in a process of its own whose hub is a stand-in."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer
from runner import PEAGLE


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


def push(hub: HubServer, home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    mine = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = inherited | mine | {"HF_TOKEN": TOKEN}
    command = [PEAGLE, "push", *map(str, args)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_push(hub: HubServer, heads: dict[str, Path], tmp_path: Path) -> None:
    done = push(hub, tmp_path, heads["p-eagle"], "me/tiny", "--private", "--message", "First")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{hub.url}/me/tiny/commit/")
    assert done.stderr == "", "no progress bar where nobody looks"
    [commit] = hub.commits
    assert commit["summary"] == "First" and hub.made["me/tiny"]["visibility"] == "private"
    assert set(commit["files"]) == {"config.json", "README.md"}
    assert set(commit["large"]) == {"model.safetensors"}


def test_push_a_corrected_head(hub: HubServer, heads: dict[str, Path], tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(heads["p-eagle"], head)
    (head / "correction").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(heads["p-eagle"] / file, head / "correction")
    ours = {"rank": 8, "candidates": 4}
    (head / "correction" / "config.json").write_text(json.dumps(ours))
    done = push(hub, tmp_path, head, "me/tiny")
    assert done.returncode == 0, done.stderr
    [commit] = hub.commits
    assert {"correction/config.json"} < set(commit["files"])
    assert "correction/model.safetensors" in commit["large"]


def test_no_token(refused, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.tools.hub.get_token", lambda: None)
    assert "no Hugging Face token" in refused("push", heads["p-eagle"], "me/tiny")


def test_not_a_head(refused, tmp_path: Path) -> None:
    assert "no config.json" in refused("push", tmp_path, "me/tiny")
