"""A tiny target, and heads trained on it for a second or two: some drafts are right, some wrong."""

import pytest
from oracle import Oracle
from tiny import METHODS, own_answers
from trained_heads import trained_head

from peagle.engine.draft import Proposer
from peagle.engine.tree import Offer
from peagle.methods.base import NewSlots
from peagle.model.drafter import Drafter
from peagle.model.target import Target


@pytest.fixture(scope="session")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drafter]:
    data = own_answers(target, 64)
    return {
        method: trained_head(target, method, data, tmp_path_factory.mktemp(method))
        for method in METHODS
    }


@pytest.fixture
def p_eagle(drafters: dict[str, Drafter]) -> Drafter:
    return drafters["p-eagle"]


@pytest.fixture(params=METHODS)
def drafter(drafters: dict[str, Drafter], request: pytest.FixtureRequest) -> Drafter:
    """A head of each method."""
    return drafters[request.param]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Stands in for the drafter: proposes the true continuation with errors at a known rate."""
    made = Oracle()

    def propose(proposer: Proposer, slots: list[NewSlots], *more: object) -> list[Offer]:
        return made.propose(proposer, slots, *more)

    monkeypatch.setattr(Proposer, "propose", propose)
    return made
