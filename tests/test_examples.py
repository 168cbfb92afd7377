"""The scripts of examples/, with a tiny target and head in the place of the demo's: they run from
top to bottom, are short, and are named in the README and on the site."""

import socket
from pathlib import Path

import pytest
from tiny import make_drafter, make_target, save_target

from peagle.heads.save import save_drafter
from peagle.methods.registry import METHODS

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRINTED = {
    "batch": "the same tokens, with drafts and without",
    "generate": "tokens in a forward of the target",
    "own_method": ".",  # tokens in a forward
    "serve": "CompletionTokensDetails(",
    "stream": "tokens were accepted draft tokens",
    "structured_output": "-",  # in a date
    "train_a_head": "\n40 ",  # the last step
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and its head."""
    folder = tmp_path_factory.mktemp("clone")
    target = make_target(layers=7, context=2048)
    save_target(target, folder / "model")
    save_drafter(make_drafter(target, "p-eagle"), folder / "head")
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_it_runs(
    clone: Path, example: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    text = example.read_text().replace("heads/smollm2-135m-p-eagle", "head")
    text = text.replace("smollm2-135m", "model").replace("8000", port)
    monkeypatch.chdir(clone)
    known = dict(METHODS)
    try:
        exec(compile(text, example, "exec"), {})
    finally:
        METHODS.clear()
        METHODS.update(known)
    assert PRINTED[example.stem] in capfd.readouterr().out


def test_they_are_short_and_named() -> None:
    assert {example.stem for example in EXAMPLES} == set(PRINTED)
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/tour.md")]
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) <= 40, example
        assert all(f"examples/{example.name}" in page for page in pages), example
