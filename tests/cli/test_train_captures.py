"""`peagle train` over several captured folders, and on answers that are measured only."""

from pathlib import Path

import pytest
from json_files import read_json
from runner import SMALL, Words, invoke, metrics

from peagle.heads.format import read_config


@pytest.fixture(scope="module")
def parts(target: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two captures, of 14 documents and of 10, and one of other layers."""
    folder = tmp_path_factory.mktemp("parts")
    lines = answers.read_text().splitlines(keepends=True)
    made = []
    for name, some, layers in (("a", lines[:14], ()), ("b", lines[14:], ()), ("c", lines, (1, 2))):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(some))
        tapped = ("--feature-layers", ",".join(map(str, layers))) if layers else ()
        invoke("data", "capture", target, "--data", data, "--output", folder / name, *tapped)
        made.append(folder / name)
    return made


def test_all_documents_of_all_folders_are_trained_on(
    target: Path, answers: Path, parts: list[Path], tmp_path: Path
) -> None:
    """As from one file of them, but for the rounding of what is captured."""
    measured = ("--held-out", answers, "--eval-every", 24, *SMALL)
    both = ("--data", parts[0], "--data", parts[1])
    invoke("train", target, *both, "--output", tmp_path / "two", *measured)
    invoke("train", target, "--data", answers, "--output", tmp_path / "one", *measured)
    two, one = (metrics(tmp_path / name) for name in ("two", "one"))
    assert len(two) == len(one) == 24, "nothing is held out where answers are named to measure on"
    assert [m["loss"] for m in two] == pytest.approx([m["loss"] for m in one], rel=0.02)
    assert "acceptance_length" in two[-1]


def test_a_run_goes_on_with_more_documents_and_with_no_others(
    target: Path, parts: list[Path], answers: Path, tmp_path: Path, refused
) -> None:
    def command(*data: Path, steps: int) -> Words:
        where = ("--output", tmp_path, "--held-out", answers)
        named = (part for folder in data for part in ("--data", folder))
        return ("train", target, *named, *where, *SMALL, "--steps", steps)

    invoke(*command(parts[0], steps=3))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    line = refused(*command(parts[1], steps=5), "--resume")
    assert "--data" in line and "documents may be added with --held-out only" in line
    again = (*command(parts[0], steps=5), "--resume")
    assert "--decay 0.7: was 0.5 when" in refused(*again, "--decay", "0.7")
    assert "give the settings that the run was started with" in refused(*again, "--fc-norm")
    assert {path: path.read_bytes() for path in before} == before
    invoke(*command(*parts[:2], steps=5), "--resume")
    assert len(metrics(tmp_path)) == 5
    newest = max((tmp_path / "checkpoints").iterdir())
    settings = read_json(newest / "progress.json")["settings"]
    assert settings["documents"] == 24
    assert "--data" in refused(*command(parts[0], steps=7), "--resume"), "they are part of it now"


def test_folders_that_do_not_fit(
    target: Path, parts: list[Path], answers: Path, tmp_path: Path, refused
) -> None:
    def line(*data: Path) -> str:
        named = (part for folder in data for part in ("--data", folder))
        return refused("train", target, *named, "--output", tmp_path / "out", *SMALL)

    other = line(parts[0], parts[2])
    assert f"{parts[2]}: captured with feature layers (1, 2), now" in other
    assert "is named twice" in line(parts[0], parts[0])
    why = "no captured shards there; give either files or captured folders"
    for path in (tmp_path / "none", answers):
        assert f"{path}: {why}" in line(parts[0], path)
    assert not (tmp_path / "out").exists()


def test_tokens_are_counted_on_from_a_head_of_the_same_target(
    target: Path, other_target: Path, answers: Path, tmp_path: Path
) -> None:
    def train(model: Path, name: str, *more: object) -> dict[str, int]:
        output = tmp_path / name
        given = ("--data", answers, "--output", output, "--steps", 2, "--depths", 4)
        invoke("train", model, *given, *more)
        return dict(read_config(output / "head").provenance.data)

    first = train(target, "first", "--layers", 2, "--draft-vocab", 112)
    start = ("--init-from", tmp_path / "first" / "head")
    assert first["steps"] == 2
    assert train(target, "second", *start)["steps"] == 4
    assert train(other_target, "other", *start)["steps"] == 2, "those of another do not count"
    frozen = train(target, "frozen", *start, "--correction", "frozen")
    assert (frozen["steps"], frozen["correction_steps"]) == (2, 2)


def test_norms_of_eagle3_and_of_a_start(target: Path, answers: Path, tmp_path: Path) -> None:
    def norms(name: str, method: str, *more: object) -> tuple[bool, bool]:
        output = tmp_path / name
        given = ("--data", answers, "--output", output, "--steps", 1, "--method", method)
        invoke("train", target, *given, "--depths", 2, *more)
        config = read_config(output / "head")
        return config.fc_norm, config.norm_output

    new = ("--layers", 1, "--draft-vocab", 112)
    assert norms("p", "p-eagle", *new) == (False, False)
    assert norms("e", "eagle3", *new) == (True, True)
    assert norms("plain", "eagle3", *new, "--no-fc-norm", "--no-norm-output") == (False, False)
    start = ("--init-from", tmp_path / "plain" / "head")
    assert norms("kept", "eagle3", *start) == (False, False)
    assert norms("added", "eagle3", *start, "--fc-norm", "--norm-output") == (True, True)
