"""The doctor finds nothing wrong with the heads in the repository."""

import pytest

from peagle.catalog import find_entry
from peagle.heads.find import find_head
from peagle.model.loader import load_target
from peagle.tools.doctor import examine

TARGET = "smollm2-135m"


@pytest.mark.parametrize("method", find_entry(TARGET).heads)
def test_shipped_heads_are_healthy(method: str) -> None:
    head = find_head(TARGET, method=method)
    assert head is not None
    checks = examine(head.folder, load_target(TARGET, dtype="float32"))
    assert [check for check in checks if check.state in ("wrong", "warning")] == []
    [accepted] = [check for check in checks if check.name == "acceptance"]
    assert accepted.state == "ok" and accepted.found.startswith("acceptance length ")
    assert float(accepted.found.split()[2]) > 2
