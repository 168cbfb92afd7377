"""A tiny target on disk and heads trained for it by `peagle train`; how a refusal looks."""

from functools import partial
from pathlib import Path

import pytest
from refusals import refused_command
from runner import SMALL, Refused, Words, invoke, save_answers, save_target
from tiny import METHODS


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the same sizes, with other weights."""
    return save_target(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_answers(tmp_path_factory.mktemp("answers") / "answers.jsonl")


@pytest.fixture(scope="session")
def runs(target: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Output folders of two finished training runs."""
    folders: dict[str, Path] = {}
    for method in METHODS:
        folders[method] = tmp_path_factory.mktemp(method)
        kind = ("--method", method, "--steps", 60, *SMALL)
        invoke("train", target, "--data", answers, "--output", folders[method], *kind)
    return folders


@pytest.fixture(scope="session")
def heads(runs: dict[str, Path]) -> dict[str, Path]:
    return {method: folder / "head" for method, folder in runs.items()}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must end with exit code 2; see refusals.refused_command."""
    return partial(refused_command, capsys)


@pytest.fixture(scope="session")
def training(target: Path, answers: Path) -> Words:
    """The command that trains a head on the target's own answers; it lacks an output."""
    return ("train", target, "--data", answers)
