"""A tiny target with a trained head, and servers of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from serving import Brake, Running, Serve, make_llm, start, train_head
from tiny import METHODS, make_drafter, make_target

from peagle.engine.llm import LLM
from peagle.heads.save import save_drafter
from peagle.model.drafter import Drafter


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return train_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def running(drafter: Drafter) -> Iterator[Running]:
    """A server that most tests share."""
    started = start(make_llm(drafter))
    yield started
    started.stop()


@pytest.fixture
def serve(drafter: Drafter) -> Iterator[Serve]:
    """Further servers, for tests that end or overload them."""
    made: list[Running] = []

    def make(llm: LLM | None = None, **config: object) -> Running:
        made.append(start(make_llm(drafter) if llm is None else llm, **config))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture(scope="session")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog in which the tiny target has a head of each method."""
    target, folder = make_target(), tmp_path_factory.mktemp("catalog")
    for method in METHODS:
        save_drafter(make_drafter(target, method), folder / method)
    heads = {method: {"folder": method, "k": 3} for method in METHODS}
    entry = {"target": "owner/tiny", "heads": heads, "note": "<b>of random weights</b>"}
    (folder / "catalog.yaml").write_text(yaml.safe_dump({target.name: entry}))
    return folder / "catalog.yaml"


@pytest.fixture(scope="session")
def llm(drafter: Drafter) -> LLM:
    """The same target and head, asked directly."""
    return make_llm(drafter)


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brake]:
    made = Brake(monkeypatch)
    yield made
    made.go.set()
