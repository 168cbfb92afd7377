"""A tiny target with a trained head, and servers of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, Serve, make_llm, start
from tiny import make_target, own_answers

from peagle.engine.llm import LLM
from peagle.model.drafter import Drafter
from peagle.model.shape import HeadSpec
from peagle.train.start import new_drafter
from peagle.train.trainer import TrainConfig, Trainer


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    target = make_target()
    data = own_answers(target, 64)
    spec = HeadSpec("p-eagle", layers=2, depths=4, draft_vocab=112, feature_layers=(1, 2, 3))
    made = new_drafter(target, [e.ids for e in data], spec)
    folder: Path = tmp_path_factory.mktemp("head")
    Trainer(TrainConfig(folder, steps=100, lr=3e-3), target, made, data).run()
    return made.eval()


@pytest.fixture(scope="session")
def running(drafter: Drafter) -> Iterator[Running]:
    """One that most tests share."""
    started = start(make_llm(drafter))
    yield started
    started.stop()


@pytest.fixture
def serve(drafter: Drafter) -> Iterator[Serve]:
    """Others, for tests that wear them out."""
    made: list[Running] = []

    def make(max_batch: int = 4, kv_tokens: int = 1024, **config: object) -> Running:
        made.append(start(make_llm(drafter, max_batch, kv_tokens), **config))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture(scope="session")
def llm(drafter: Drafter) -> LLM:
    """The same target and head, asked directly."""
    return make_llm(drafter)
