"""`peagle eval`."""

from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from json_files import write_lines
from runner import invoke, printed

from peagle.engine import setup
from peagle.engine.engine import Engine

TOKEN_BYTES = 1000
FIELDS = {
    "dataset", "method", "k", "max_nodes", "lookup", "concurrency", "temperature",
    "acceptance_length", "accepted_per_position", "nodes", "rows_per_round", "tokens_per_forward",
    "accepted_from_lookup", "rounds", "output_tokens", "skipped_turns", "error",
}  # fmt: skip


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    turns = ({"turns": ["the cat", "the hat"]}, {"turns": ["what a day"]}, {"turns": ["mat"]})
    return write_lines(tmp_path / "questions.jsonl", *turns)


def test_json_has_a_row_a_k(target: Path, heads: dict[str, Path], questions: Path) -> None:
    options = ("--head", heads["p-eagle"], "--dataset", questions, "--max-tokens", 20)
    report = printed("eval", target, *options, "--k", "2,4", "--temperature", 0)
    assert set(report) == {"rows", "verdict"}
    assert [timing["k"] for timing in report["verdict"]["timings"]] == [2, 4]
    assert report["verdict"]["worth_it"] == report["verdict"]["sentence"].startswith("worth it: ")
    rows = report["rows"]
    assert [(row["dataset"], row["k"], row["temperature"]) for row in rows] == [
        ("questions", 2, 0.0),
        ("questions", 4, 0.0),
    ]
    for row in rows:
        assert set(row) == FIELDS
        assert len(row["accepted_per_position"]) == row["k"]
        assert row["acceptance_length"] > 1
        assert (row["lookup"], row["max_nodes"], row["nodes"]) == (False, None, row["k"])
        assert 1 < row["tokens_per_forward"] <= row["acceptance_length"] + 0.2
    assert rows[0]["output_tokens"] == rows[1]["output_tokens"]  # greedy: the same answers
    assert rows[1]["acceptance_length"] >= rows[0]["acceptance_length"]


def test_limit_takes_the_first_records_and_timing_may_be_left_out(
    target: Path, heads: dict[str, Path], questions: Path
) -> None:
    options = ("--head", heads["eagle3"], "--dataset", questions, "--max-tokens", 5, "--k", 2)
    tokens = list[int]()
    for limit in (1, 2, 3):
        report = printed("eval", target, *options, "--limit", limit, "--no-timing")
        assert report["verdict"] is None
        tokens.append(report["rows"][0]["output_tokens"])
    assert 0 < tokens[0] < tokens[1] < tokens[2]
    assert "worth it" not in invoke("eval", target, *options, "--no-timing").stdout
    said = invoke("eval", target, *options).stdout.splitlines()[-1]
    assert "worth it: " in said or said.startswith("not judged: "), "the latter on a busy machine"


def test_table_and_warning_for_a_k_above_the_heads(
    target: Path, heads: dict[str, Path], questions: Path
) -> None:
    options = ("--head", heads["p-eagle"], "--dataset", questions, "--max-tokens", 4)
    result = invoke("eval", target, *options, "--k", "2,9")
    assert result.stderr.count("warning: K = 9") == 1
    cells = [[c.strip() for c in line.split("│")] for line in result.stdout.splitlines()]
    assert [row[1:3] for row in cells if "questions" in row] == [
        ["questions", "K = 2"],
        ["questions", "K = 9"],
    ]


def test_turns_that_are_left_out_say_why(
    target: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    turns = ({"turns": ["the cat", "cat " * 400, "hat"]}, {"turns": ["mat"]})
    questions = write_lines(tmp_path / "questions.jsonl", *turns)
    options = ("--head", heads["p-eagle"], "--dataset", questions, "--max-tokens", 4, "--k", 2)
    said = invoke("eval", target, *options, "--no-timing").stderr
    assert "warning: 2 turns left out, the first by: prompt[0]: has " in said


def test_trees(target: Path, heads: dict[str, Path], questions: Path) -> None:
    asked = ("--dataset", questions, "--max-tokens", 20)
    head = ("--head", heads["p-eagle"])
    both = printed("eval", target, *head, *asked, "--nodes", "4,12")
    alone = printed("eval", target, *head, *asked, "--nodes", 12, "--no-lookup", "--k", 3)
    rows = [*both["rows"], *alone["rows"]]
    settings = [(row["k"], row["max_nodes"], row["lookup"]) for row in rows]
    assert settings == [(None, 4, True), (None, 12, True), (3, None, False), (None, 12, False)]
    assert [timing["max_nodes"] for timing in both["verdict"]["timings"]] == [4, 12]
    assert " nodes + lookup" in both["verdict"]["sentence"]
    for row in rows:
        most = row["max_nodes"] or row["k"]
        assert most / 2 < row["nodes"] <= most
        assert 1 + row["nodes"] / 2 < row["rows_per_round"] <= 1 + row["nodes"]
        assert row["accepted_from_lookup"] <= (99 if row["lookup"] else 0)
    [lookup] = printed("eval", target, *asked, "--method", "lookup", "--nodes", 8)["rows"]
    assert (lookup["method"], lookup["lookup"], lookup["max_nodes"]) == ("lookup", True, 8)
    shares = sum(lookup["accepted_per_position"]) * lookup["rounds"]
    assert lookup["accepted_from_lookup"] == pytest.approx(shares, abs=0.1)


def test_little_memory_is_enough(
    target: Path, heads: dict[str, Path], questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is gone before the next one is measured; those that are timed together are small.
    Room for 4,000 tokens, of which one engine for many requests takes more than half."""
    living = WeakSet[Engine]()
    make = setup.Engine

    def made(*parts: Any) -> Engine:
        engine = make(*parts)
        living.add(engine)
        return engine

    def free(_: torch.device) -> int:
        return TOKEN_BYTES * (4000 - sum(engine.settings.kv_tokens for engine in living))

    monkeypatch.setattr(setup, "Engine", made)
    monkeypatch.setattr(setup, "free_memory", free)
    monkeypatch.setattr(setup, "token_bytes", lambda *_: TOKEN_BYTES)
    monkeypatch.setitem(setup.SHARE, "cpu", 0.85)
    options = ("--head", heads["p-eagle"], "--dataset", questions, "--max-tokens", 4)
    report = printed("eval", target, *options, "--k", "1,2,3,4")
    assert len(report["rows"]) == len(report["verdict"]["timings"]) == 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--k", "3,0"), "k"),
        (("--k", "a"), "k"),
        (("--limit", "0"), "limit"),
        ((), "head"),
        (("--method", "lookup"), "head"),
        (("--nodes", "0"), "nodes"),
        (("--nodes", "999", "--method", "lookup"), "nodes"),
        # A chain is a head's.
        (("--nodes", "8", "--k", "5"), "k"),
        (("--nodes", "8", "--k", "5", "--method", "lookup"), "k"),
    ],
)
def test_refusals(refused, target: Path, questions: Path, options, field: str) -> None:
    refused("eval", target, "--dataset", questions, *options, field=field)
