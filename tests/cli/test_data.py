"""`peagle data regenerate`, and training on what it wrote."""

import json
from pathlib import Path

from runner import invoke, metrics, write_lines
from typer.testing import CliRunner

from peagle.cli.main import app
from peagle.model.config import Method


def test_answers_can_be_trained_on(target: Path, heads: dict[Method, Path], tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        {"turns": ["the cat", "the hat"]},
        {"messages": [{"role": "user", "content": "what a day"}]},
        {"turns": ["not asked"]},
    )
    made = tmp_path / "new" / "made.jsonl"
    options = ("--prompts", prompts, "--output", made, "--limit", 2, "--max-tokens", 10)
    command = ("data", "regenerate", target, *options, "--head", heads["p-eagle"])
    assert f"wrote 3 answers to {made}" in invoke(*command).stderr
    records = [json.loads(line) for line in made.read_text().splitlines()]
    assert [record["record"] for record in records] == [0, 0, 1]
    assert [len(record["messages"]) for record in records] == [2, 4, 2]
    assert f"wrote 0 answers to {made}" in invoke(*command).stderr

    small = ("--layers", 1, "--depths", 2, "--draft-vocab", 100)
    invoke("train", target, "--data", made, "--output", tmp_path / "out", *small)
    assert len(metrics(tmp_path / "out")) == 3  # one epoch: a step a document


def test_batch_of_none_is_refused(target: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", {"turns": ["hi"]})
    command = ["data", "regenerate", str(target), "--prompts", str(prompts)]
    command += ["--output", str(tmp_path / "made.jsonl"), "--batch", "0"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "--batch" in result.output


def test_prompts_must_exist(refused, target: Path, tmp_path: Path) -> None:
    options = ("--prompts", tmp_path / "none.jsonl", "--output", tmp_path / "made.jsonl")
    line = refused("data", "regenerate", target, *options)
    assert f"--prompts {tmp_path / 'none.jsonl'}: no such file" in line
