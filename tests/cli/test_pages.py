"""Pages for newcomers: their commands run, in the order of the page, with a tiny target in the
place of the models that they name. What needs more than this machine has is parsed only."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from runner import SMALL, Refused, invoke
from test_docs import FENCE, ROOT, calls

PAGES = ["README.md", "docs/tour.md", "docs/tutorial.md"]
PAGES += sorted(f"docs/recipes/{page.name}" for page in (ROOT / "docs" / "recipes").glob("*.md"))
MODELS = re.compile(r"(coder|mine)\.gguf|smollm2-135m|my-org/my-finetune")
ELSEWHERE = re.compile(r"# needs |--engine vllm|--to (kubernetes|sagemaker)|--url")
LONG = ("serve", "chat", "demo")  # they do not end, or are the demo's own
SHORTER = {
    "train": (*SMALL, "--steps", "2", "--eval-every", "1"),
    "regenerate": ("--max-tokens", "16"),
    "generate": ("--max-tokens", "8"),
    "eval": ("--max-tokens", "8", "--limit", "1", "--no-timing"),
    "bench": ("--max-tokens", "4", "--limit", "1", "--repeats", "1"),
}


@pytest.fixture
def folder(
    target: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the files that pages take as given."""
    for name in ("prompts", "questions"):
        asked = [json.dumps({"turns": [f"the cat {number}"]}) for number in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(asked) + "\n")
    (tmp_path / "person.json").write_text('{"enum": ["Ann", "Bob"]}')
    (tmp_path / "model").symlink_to(target)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "head").symlink_to(heads["p-eagle"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(page: str) -> Iterator[list[str]]:
    """The commands of a page that end and need nothing but this machine."""
    for language, block in FENCE.findall((ROOT / page).read_text()):
        for words in calls(block) if language == "sh" and not ELSEWHERE.search(block) else ():
            if words[0] not in LONG:
                called = [MODELS.sub("model", word) for word in words]
                shorter = SHORTER.get("regenerate" if "regenerate" in called else called[0], ())
                yield [word for word in called if word not in ("--quantize", "int4")] + [*shorter]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_its_commands_run(folder: Path, page: str) -> None:
    found = list(commands(page))
    assert found or page == "docs/recipes/vllm-fleet.md"
    for words in found:
        invoke(*words)


@pytest.mark.slow
def test_the_tutorials_steps_again_and_out_of_order(folder: Path, refused: Refused) -> None:
    """A step whose file is missing is refused by name and leaves nothing. Again, a step continues
    or is refused; what it wrote stays."""
    steps = list(commands("docs/tutorial.md"))
    before = sorted(folder.iterdir())
    for words in steps:
        if {"answers.jsonl", "captured", "runs/mine/best"} & {*words} and "regenerate" not in words:
            refused(*words)
    assert sorted(folder.iterdir()) == before
    for words in steps:
        invoke(*words)
    answers = (folder / "answers.jsonl").read_bytes()
    for words in steps:
        if words[0] in ("train", "export"):
            refused(*words, field="output")
        else:
            invoke(*words)
    assert (folder / "answers.jsonl").read_bytes() == answers
