"""The tiny target that most tests train for, and documents whose answers are its own."""

import pytest
from tiny import own_answers

from peagle.data.example import Example
from peagle.model.target import Target


@pytest.fixture(scope="session")
def data(target: Target) -> list[Example]:
    return own_answers(target, 5)


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heads multiply in the type of their weights, not in bf16."""
    monkeypatch.setattr("peagle.train.trainee.multiplies_bf16", lambda device: False)
