"""`benchmarks/trees.py` and what it is made of; what is played is made up."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from peagle.bench.summary import Played, Sample
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats


@pytest.fixture
def trees(benchmark_script):
    return benchmark_script("trees")


def played(seconds: float, tokens: tuple[int, ...] = (1, 2)) -> Played:
    """One conversation; each forward emitted two tokens."""
    sample = Sample(0, 0, seconds, seconds / 2, len(tokens), tokens)
    stats = Stats(1, 3, [1, 0, 0], 1, 1, 2)
    return Played([sample], seconds, stats)


@pytest.fixture
def part(trees):
    def make(name: str = "humaneval", count: int = 3, c: int = 1):
        ways = trees.one_at_a_time() if c == 1 else trees.under_load(c)
        conversations = [[f"question {number}"] for number in range(count)]
        return trees.Part(name, conversations, ways, SamplingParams(max_tokens=2))

    return make


def test_a_journal_goes_on_behind_its_last_whole_line(trees, tmp_path: Path) -> None:
    journal_of = import_module("common").Journal
    file, about = tmp_path / "all.jsonl", {"device": "a machine", "settings": {"k": (1,)}}
    first = journal_of(file, about, resume=True)
    first.add("edits", 4, {"alone": played(1.5)})
    with file.open("a") as lines:
        lines.write('{"part": "edits", "num')
    second = journal_of(file, about, resume=True)
    assert second.of("edits") == {4: {"alone": played(1.5)}}
    second.add("edits", 5, {"alone": played(2.5)})
    assert list(journal_of(file, about, resume=True).of("edits")) == [4, 5]
    with pytest.raises(SystemExit, match="measured with other device: leave out --resume"):
        journal_of(file, about | {"device": "another"}, resume=True)
    assert journal_of(file, about, resume=False).plays == {}


def test_only_what_is_missing_is_played(trees, part, tmp_path: Path, monkeypatch) -> None:
    journal = import_module("common").Journal(tmp_path / "all.jsonl", {}, resume=False)
    journal.add("humaneval", 1, {})
    asked = list[int]()
    monkeypatch.setattr(trees, "open_engines", lambda *_: {})
    monkeypatch.setattr(trees, "play", lambda part, number, engines: asked.append(number) or {})
    written = sum(1 for _ in trees.fill(part(), journal, None, {}))
    assert asked == [0, 2] and written == 3
    assert list(trees.fill(part(), journal, None, {})) == [None] and asked == [0, 2]


def test_ways_answer_a_prompt_before_the_next_in_rotating_order(trees, part, monkeypatch) -> None:
    asked = list[tuple[str, str]]()

    class Player:
        def __init__(self, engine, params):
            self.engine = engine

        def play(self, conversations, concurrency):
            asked.append((self.engine, conversations[0][0]))
            return played(1.0)

    monkeypatch.setattr(trees, "Player", Player)
    engines = {way: way for way in part().ways}
    for number in range(2):
        assert trees.play(part(), number, engines).keys() == engines.keys()
    ways = list(engines)
    rotated = [(way, "question 1") for way in [*ways[1:], ways[0]]]
    assert asked == [(way, "question 0") for way in ways] + rotated


def test_speeds_of_a_data_set_are_ratios_of_all_tokens_a_second(trees, part) -> None:
    # Twice as fast as the target alone in each prompt, whatever the machine does meanwhile.
    pace = [1.0, 5.0, 2.0]
    found = {
        n: {way: played(x if way == "alone" else x / 2) for way in part().ways}
        for n, x in enumerate(pace)
    }
    rows = {row["way"]: row for row in trees.dataset_rows(part(), found)}
    own = rows["P-EAGLE"]
    even = dict.fromkeys(("EAGLE-3 chain", "EAGLE-3 + lookup"), [1.0, [1.0, 1.0]])
    assert own["over"] == {"alone": [2.0, [2.0, 2.0]], **even}
    assert rows["alone"]["output_tps"] == 0.75 and rows["alone"]["k"] == 0
    assert (own["k"], own["lookup"], own["same"], own["compared"]) == ("adaptive", True, 3, 3)
    assert (own["nodes"], own["rows_per_round"], own["tokens_per_forward"]) == (3.0, 4.0, 2.0)


def test_speeds_under_load_are_medians_of_repeats(trees, part) -> None:
    seconds = {"alone": [1.0, 8.0, 1.0], "P-EAGLE": [1.0, 8.0, 4.0], "P-EAGLE chain": [0.9, 7, 2]}
    loaded = part("load 4", c=4)
    found = {
        n: {way: played(seconds.get(way, [9.0] * 3)[n]) for way in loaded.ways} for n in range(3)
    }
    rows = {row["way"]: row for row in trees.load_rows(loaded, found)}
    assert rows["P-EAGLE"]["over"] == {
        "alone": [1.0, [0.25, 1.0]],
        "P-EAGLE chain": [0.875, [0.5, 0.9]],  # the best of those that are pinned
    }


def test_edits_are_programs_of_about_60_lines_that_name_the_variable_often(trees) -> None:
    files = trees.edited_files()
    assert len(set(files)) == len(trees.edits()) == 20
    for words, file in zip(trees.WORDS, files, strict=True):
        ast.parse(file)
        assert 55 <= len(file.splitlines()) <= 70
        assert len(re.findall(rf"\b{words['many']}\b", file)) > 10
        assert not re.search(rf"\b{words['new']}\b", file)
