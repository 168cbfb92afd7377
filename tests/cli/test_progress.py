"""Progress lines of long commands without a terminal; the message and the files after Ctrl-C."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
from json_files import read_json, write_lines
from rich.progress import ProgressSample
from runner import SMALL, Words, invoke

from peagle.cli import common
from peagle.cli.common import counting, progress_bar, screen
from peagle.engine.engine import Engine
from peagle.engine.request import Request

AGAIN = "written, run it again to go on"


class Log:
    """The lines that a command logs about its progress, at once instead of every 30 seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines = list[str]()
        self._seen = Event()
        monkeypatch.setattr(common, "LOG_SECONDS", 0.001)
        monkeypatch.setattr(screen, "print", self._print)

    def _print(self, text: object = "", **_: object) -> None:
        self.lines.append(str(text))
        self._seen.set()

    def next(self) -> str:
        """Wait for a line that is begun after this call."""
        for _ in range(2):  # the first may have been begun before
            self._seen.clear()
            assert self._seen.wait(60)
        return self.lines[-1]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


interrupted = partial(invoke, code=130)


Conditions = list[Callable[[], bool]]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Conditions:
    """Ctrl-C in the first round of an engine for which what is put into the list is true."""
    conditions, step = Conditions(), Engine.step

    def press(engine: Engine) -> None:
        if any(condition() for condition in conditions):
            raise KeyboardInterrupt
        step(engine)

    monkeypatch.setattr(Engine, "step", press)
    return conditions


def test_a_line_has_the_count_a_note_and_the_time_left(log: Log) -> None:
    with progress_bar("answers") as bar:
        task = bar.add_task("", total=30)
        assert log.next() == "0 of 30 answers"
        bar.update(task, completed=6, description="310 tokens/s")
        assert log.next() == "6 of 30 answers, 310 tokens/s"
        bar.tasks[0]._progress.extend([ProgressSample(0.0, 0.0), ProgressSample(10.0, 6.0)])
        del bar.tasks[0]._progress[0]
        assert log.next() == "6 of 30 answers, 310 tokens/s, 40 s left"


def test_tokens_are_counted_by_the_second(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0])
    with monkeypatch.context() as patch:
        patch.setattr("peagle.cli.common.time.monotonic", lambda: next(now, 110.0))
        with counting("answers", None, AGAIN) as count:
            count(3, 9, 40)
            assert log.next().startswith("3 of 9 answers, 4 tokens/s")


def test_nothing_is_logged_on_a_terminal(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_force_terminal", True)
    monkeypatch.setattr(screen, "quiet", True)
    with progress_bar("answers") as bar:
        bar.add_task("", total=30)
        Event().wait(0.05)
    assert not any("answers" in line for line in log.lines)  # rich itself prints empty ones


def test_ctrl_c_keeps_the_answers_that_have_ended(
    target: Path, tmp_path: Path, interrupt: Conditions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts run in one batch. The second conversation has ended when the second turn of the
    others begins."""
    turns_begun, add = list[object](), Engine.add

    def counted(engine: Engine, *requests: Request) -> None:
        turns_begun.append(requests)
        add(engine, *requests)

    monkeypatch.setattr(Engine, "add", counted)
    turns = ({"turns": ["the cat", "the hat"]}, {"turns": ["mat"]}, {"turns": ["sat", "on"]})
    prompts, made = write_lines(tmp_path / "p.jsonl", *turns), tmp_path / "made.jsonl"
    command = ("data", "regenerate", target, "--prompts", prompts, "--output", made)
    interrupt.append(lambda: len(turns_begun) > 1)
    result = interrupted(*command, "--max-tokens", 6)
    assert result.stderr.splitlines() == [f"stopped: 1 of 5 answers {AGAIN}"]
    assert [json.loads(line)["record"] for line in made.open()] == [1]
    interrupt.clear()
    assert "wrote 4 answers" in invoke(*command, "--max-tokens", 6).stderr
    assert len(made.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("generate", "TARGET", "x"), "stopped"),
        (("chat", "TARGET"), "stopped"),
        (("doctor", "HEAD", "TARGET"), "stopped"),
        (("eval", "TARGET", "--head", "HEAD", "--dataset", "Q"), "stopped: 0 of 4 turns answered"),
        (
            ("data", "synth", "TARGET", "--output", "made.jsonl", "--count", 3),
            f"stopped: 0 of 3 records {AGAIN}",
        ),
        (
            ("train", "TARGET", "--data", "synth", "--output", "out", "--steps", 2),
            f"stopped: 0 of 20 records {AGAIN}",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_ctrl_c_ends_with_130_and_a_line(  # noqa: PLR0913, PLR0917 (fixtures)
    target: Path,
    heads: dict[str, Path],
    tmp_path: Path,
    interrupt: Conditions,
    command: Words,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = write_lines(tmp_path / "q.jsonl", {"turns": ["the cat"]}, {"turns": ["mat"]})
    named: dict[object, object] = {"TARGET": target, "HEAD": heads["p-eagle"], "Q": questions}
    interrupt.append(lambda: True)
    result = interrupted(*(named.get(word, word) for word in command), stdin="hello\n")
    assert result.stderr.splitlines()[-1] == said


def test_ctrl_c_in_a_capture(
    target: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("peagle.train.capture.run_document", pressed)
    result = interrupted("data", "capture", target, "--data", answers, "--output", tmp_path / "c")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("stopped: 0 of 24 documents") and "run the same command" in last


def test_ctrl_c_in_bench(target: Path, tmp_path: Path, interrupt: Conditions) -> None:
    questions = write_lines(tmp_path / "q.jsonl", {"turns": ["the cat"]})
    output = tmp_path / "bench.json"
    how = ("--methods", "none", "--dataset", questions, "--max-tokens", 2, "--repeats", 2)
    interrupt.append(output.exists)
    result = interrupted("bench", target, *how, "--output", output)
    assert result.stderr.splitlines()[-1] == "stopped: 1 of 2 loads measured"
    report = read_json(output)
    assert len(report["rows"]) == 1 and not report["complete"]
    page = output.with_suffix(".html")
    assert "Incomplete" in page.read_text() and str(page) in result.stdout.replace("\n", "")


def test_ctrl_c_before_the_first_load(target: Path, tmp_path: Path, interrupt: Conditions) -> None:
    """An earlier report and its page stay."""
    questions = write_lines(tmp_path / "q.jsonl", {"turns": ["the cat"]})
    files = [tmp_path / "bench.json", tmp_path / "bench.html"]
    for file in files:
        file.write_text("earlier")
    how = ("--methods", "none", "--dataset", questions, "--max-tokens", 2, "--output", files[0])
    interrupt.append(lambda: True)
    result = interrupted("bench", target, *how)
    assert result.stderr.splitlines()[-1] == "stopped: 0 of 3 loads measured"
    assert result.stdout == "" and {file.read_text() for file in files} == {"earlier"}


def test_training_says_what_it_trains_on_and_measures(
    training: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "LOG_SECONDS", 0.001)
    command = (*training, "--output", tmp_path, *SMALL)
    first, *lines = invoke(*command, "--steps", 20).stderr.splitlines()
    found = re.fullmatch(
        r"training on 22 documents \((\d+) tokens, (\d+) of answers\), "
        r"measured on 2 held out: steps 1 to 20",
        first,
    )
    assert found is not None and 0 < int(found[2]) < int(found[1])
    assert any(re.match(r"\d+ of 20 steps, loss \d", line) for line in lines)
    assert any(re.match(r"step 20: acceptance length .* over 2 documents", each) for each in lines)
    again = invoke(*command, "--steps", 21, "--resume").stderr
    assert "steps 21 to 21" in again
