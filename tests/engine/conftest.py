"""A tiny target, and heads trained on it for a second or two: some drafts are right, some wrong."""

from pathlib import Path

import pytest
from oracle import Oracle
from tiny import METHODS, make_target, own_answers

from peagle.model.config import Method
from peagle.model.drafter import Drafter
from peagle.model.shape import HeadSpec
from peagle.model.target import Target
from peagle.train.start import new_drafter
from peagle.train.trainer import TrainConfig, Trainer


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="session")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[Method, Drafter]:
    data = own_answers(target, 64)
    return {method: _trained(target, method, data, tmp_path_factory) for method in METHODS}


def _trained(target, method, data, tmp_path_factory) -> Drafter:  # noqa: ANN001
    spec = HeadSpec(method, layers=2, depths=4, draft_vocab=112, feature_layers=(1, 2, 3))
    drafter = new_drafter(target, [e.ids for e in data], spec)
    folder: Path = tmp_path_factory.mktemp(method)
    Trainer(TrainConfig(folder, steps=100, lr=3e-3), target, drafter, data).run()
    return drafter.eval()


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Stands in for the drafter: proposes the true continuation with errors at a known rate."""
    made = Oracle()
    monkeypatch.setattr("peagle.engine.engine.propose", made.propose)
    return made
