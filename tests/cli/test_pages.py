"""The documentation's commands run, in the order of their page, on tiny models under the names that
pages use. Those that need more than this machine say so in a comment: `# needs`."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from json_files import write_lines
from runner import SMALL, Refused, invoke
from test_docs import FENCE, ROOT, calls

PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
NEEDS = re.compile(r"^# needs .*|^(?:.*\\\n)*.*(?:# needs |--engine vllm).*$", re.MULTILINE)
HEREDOC = re.compile(r"<<'END'\n.*?^END$", re.DOTALL | re.MULTILINE)
HERE = (  # at hand in a clone
    "peagle", "python", "export", ".", "mv", "echo", "make", "taskset", "END",
)  # fmt: skip
ENDLESS = ("serve", "chat")
OTHERS = (["deploy", "invoke"], ["bench", "compare"])  # of a running server, of two reports
SHORTER = {
    "train": (*SMALL, "--steps", "2", "--eval-every", "1"),
    "regenerate": ("--max-tokens", "16"),
    "synth": ("--count", "4", "--max-tokens", "16"),
    "generate": ("--max-tokens", "8"),
    "eval": ("--max-tokens", "8", "--limit", "1", "--no-timing"),
    "bench": ("--max-tokens", "4", "--limit", "1", "--repeats", "1", "--concurrency", "1"),
}
GUIDES = ("docs/deployment.md", "docs/jobs.md", "docs/troubleshooting.md")  # after a training
TOO_NARROW = ("--quantize", "int4")


@pytest.fixture
def folder(
    target: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the models, prompts and heads that pages name."""
    for name in ("prompts", "questions"):
        asked = ({"turns": [f"the cat {number}"]} for number in range(20))
        write_lines(tmp_path / f"{name}.jsonl", *asked)
    (tmp_path / "person.json").write_text('{"enum": ["Ann", "Bob"]}')
    for owner in ("my-org", "owner"):
        (tmp_path / owner).mkdir()
    for model in ("my-model", "my-finetune", "base", "demo"):
        (tmp_path / "my-org" / model).symlink_to(target)
    (tmp_path / "owner" / "head").symlink_to(heads["p-eagle"])
    known = {method: {"folder": str(head), "k": 3} for method, head in heads.items()}
    entries = {"smollm2-135m": {"target": "my-org/demo", "heads": known}}
    (tmp_path / "catalog.yaml").write_text(yaml.safe_dump(entries))
    monkeypatch.setenv("PEAGLE_CATALOG", str(tmp_path / "catalog.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page: str) -> Iterator[str]:
    """Shell blocks of a page without what needs more than this machine."""
    for language, block in FENCE.findall((ROOT / page).read_text()):
        if language == "sh" and not block.startswith("# needs "):
            yield NEEDS.sub("", HEREDOC.sub("", block))


def commands(page: str) -> Iterator[list[str]]:
    """The page's calls of peagle that end, on the tiny target and with little work."""
    for words in (call for block in blocks(page) for call in calls(block)):
        if words[0] not in ENDLESS and words[:2] not in OTHERS:
            part = words[1] if words[0] == "data" else words[0]
            called = [re.sub(r"(coder|mine)\.gguf", "my-org/my-model", word) for word in words]
            yield [word for word in called if word not in TOO_NARROW] + [*SHORTER.get(part, ())]


def made_before(folder: Path, page: str, head: Path, answers: Path) -> None:
    """Files that a page takes from another one."""
    if page in GUIDES:
        (folder / "runs").mkdir()
        (folder / "runs" / "mine").symlink_to(head.parent)
        shutil.copy(answers, folder / "answers.jsonl")


@pytest.mark.parametrize("page", PAGES)
def test_what_its_other_commands_need_is_said(page: str) -> None:
    """Commands of other tools, where a clone does not have them."""
    first = re.compile(r"^(?:\w+=\S+ )*([\w./-]+)", re.MULTILINE)
    for block in blocks(page):
        joined = block.replace("\\\n", " ")
        for name in first.findall(joined):
            assert name in HERE or name.startswith(".venv-vllm/"), f"{name}: mark it by # needs"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_its_commands_run(folder: Path, heads: dict[str, Path], answers: Path, page: str) -> None:
    made_before(folder, page, heads["p-eagle"], answers)
    for words in commands(page):
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
