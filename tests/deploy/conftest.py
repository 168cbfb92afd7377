"""A kubectl that is first and alone on the PATH."""

from pathlib import Path

import pytest
from stand_ins import Kubectl


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Kubectl(folder)
