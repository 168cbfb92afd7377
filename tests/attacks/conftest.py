"""Fixtures of attacks: a server to attack, and the counts that are printed at the end."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving_alone import Victim

Count = Callable[..., None]


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A server; the test that ends it fails."""
    made = Victim()
    yield made
    made.close()


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Note how many attacks of a kind were tried: `count("grammars", 20)`."""

    def note(kind: str, number: int = 1) -> None:
        record_property(f"attacks: {kind}", number)

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts. They are properties of reports, which reach here from all workers."""
    counts = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name.startswith("attacks: ") and getattr(report, "when", "") == "call":
                    counts[name.removeprefix("attacks: ")] += value
    for kind, number in sorted(counts.items()):
        terminalreporter.write_line(f"{number:6} {kind}")
