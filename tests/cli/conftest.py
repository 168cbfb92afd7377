"""A tiny target on disk and heads trained for it by `peagle train`; how a refusal looks."""

from pathlib import Path

import pytest
from runner import SMALL, Refused, invoke, save_answers, save_target
from tiny import METHODS

from peagle.cli.main import main
from peagle.errors import InputError


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
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs `peagle …`, which must end with code 2 and one line on stderr, of `field` where one is
    given; returns that line."""

    def run(*args: object, field: str | None = None) -> str:
        monkeypatch.setattr("sys.argv", ["peagle", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == 2, said.err
        assert said.out == ""
        [line] = said.err.splitlines()
        assert line.startswith("peagle: ")
        if field is not None:
            error = ended.value.__context__
            assert isinstance(error, InputError)
            named = field in line.replace("-", "_")
            assert error.field == field or (error.field is None and named), line
        return line

    return run
