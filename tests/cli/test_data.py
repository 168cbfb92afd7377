"""`peagle data`: what it makes can be looked at, and trained on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from runner import invoke, metrics, printed, write_lines

from peagle.cli.data import _mix
from peagle.cli.settings import read_pairs

SMALL = ("--layers", 1, "--depths", 2, "--draft-vocab", 100)
USER = ("--temperature", 1.2, "--prompt-tokens", 48, "--max-tokens", 8)
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "prompts.jsonl", {"turns": ["the cat", "ran"]}, {"turns": ["mat"]}
    )


def test_answers_can_be_trained_on(target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
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
    records = read(made)
    assert [record["record"] for record in records] == [0, 0, 1]
    assert [len(record["messages"]) for record in records] == [2, 4, 2]
    assert f"wrote 0 answers to {made}" in invoke(*command).stderr

    invoke("train", target, "--data", made, "--output", tmp_path / "out", *SMALL)
    assert len(metrics(tmp_path / "out")) == 3  # one epoch: a step a document


def test_data_from_nothing_can_be_trained_on(target: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.jsonl"
    command = ("data", "synth", target, "--output", made, *USER, "--mix", "chat=2,math=1")
    done = invoke(*command, "--count", 3)
    assert f"wrote 3 records to {made}, which has chat 2, math 1" in done.stderr
    assert "drafts not used: " in done.stderr
    assert "wrote 0 records" in invoke(*command, "--count", 3).stderr
    summary = printed("data", "show", made, "--target", target)
    assert (summary["records"], summary["kinds"]) == (3, {"chat": 2, "math": 1})
    invoke("train", target, "--data", made, "--output", tmp_path / "out", *SMALL)
    assert len(metrics(tmp_path / "out")) == 3


def test_system_prompt_and_template_arguments(target: Path, prompts: Path, tmp_path: Path) -> None:
    template, made = tmp_path / "chat.jinja", tmp_path / "made.jsonl"
    template.write_text(
        "{% if think is false %}quick {% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    how = ("--system", "be brief", "--chat-template", template, "--max-tokens", 4)
    how = (*how, "--chat-template-arg", "think=false", "--output", made)
    invoke("data", "regenerate", target, "--prompts", prompts, *how)
    records = read(made)
    assert [record["template_args"] for record in records] == [{"think": False}] * 3
    shown = printed("data", "show", made, "--target", target, "--record", 1)["documents"][0]
    start = "quick system: be brief<|im_end|>user: the cat<|im_end|>assistant: "
    assert shown["pieces"][0] == {"text": start, "supervised": False}

    synth = tmp_path / "synth.jsonl"
    how = (*how[:-1], synth)
    invoke("data", "synth", target, *USER, *how, "--count", 1, "--mix", "chat=1")
    [record] = read(synth)
    assert record["template_args"] == {"think": False}
    assert record["messages"][0] == {"role": "system", "content": "be brief"}


def test_turns_that_do_not_fit_are_counted(target: Path, tmp_path: Path) -> None:
    long = "the cat sat " * 36
    turns = [[long, "ran", long], ["the cat sat " * 99]]
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"turns": texts} for texts in turns))
    made = ("--output", tmp_path / "made.jsonl", "--max-tokens", 4)
    said = invoke("data", "regenerate", target, "--prompts", prompts, *made).stderr
    assert "wrote 3 answers" in said
    assert "without their oldest turns, to fit the context: 1" in said
    assert "turns left out, too long even alone: 1" in said


def test_show_a_file(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"messages": TALK}, {"messages": TALK[:1]})
    shown = invoke("data", "show", file, "--target", target).stdout.splitlines()
    numbers = dict(line.split(maxsplit=1) for line in shown[:1] + shown[-2:-1])
    assert numbers == {"records": "2", "unusable": "1"}
    assert "kinds          none given" in shown
    assert shown[-1] == "  record 2: the conversation has no assistant turn to train on"
    summary = printed("data", "show", file, "--target", target)
    assert f"answer tokens  {summary['answer_tokens']}" in shown
    assert f"p50 {summary['lengths']['p50']}," in "\n".join(shown)


def test_show_a_record(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"messages": TALK})
    command = ("data", "show", file, "--target", target, "--record", 1)
    shown = invoke(*command).stdout
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert shown.startswith(f"{text}⟦sat<|im_end|>⟧\n")
    document = printed(*command)["documents"][0]
    counts = f"--- {document['tokens']} tokens, {document['answer_tokens']} of them trained on"
    assert counts in shown
    assert len(document["ids"]) == len(document["supervised"]) == document["tokens"]
    longest = document["tokens"] - 2
    assert ", 2 cut" in invoke(*command, "--max-length", longest).stdout

    monkeypatch.setattr("peagle.cli.data.console._force_terminal", True)
    monkeypatch.setattr("peagle.cli.data.console._color_system", 1)
    colored = invoke(*command, color=True).stdout
    assert "\x1b[32msat<|im_end|>\x1b[0m" in colored
    assert "⟦" not in colored


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--mix", "poem=1"), "mix"),
        (("--mix", "chat=much"), "mix"),
        (("--mix", "chat=true"), "mix"),
        (("--mix", "chat"), "mix"),
        (("--mix", "chat=1,chat=2"), "mix"),
        (("--mix", "chat=0"), "mix"),
        (("--mix", ""), "mix"),
        (("--count", 0), "count"),
        (("--temperature", 0), "temperature"),
        (("--prompt-tokens", 0), "prompt_tokens"),
        (("--max-tokens", 0), "max_tokens"),
        (("--chat-template-arg", "think"), "chat_template_arg"),
        (("--chat-template-arg", "a=["), "chat_template_arg"),
    ],
)
def test_synth_options(refused, tmp_path: Path, options: tuple[object, ...], field: str) -> None:
    """All of them before a target is loaded."""
    made = ("--output", tmp_path / "made.jsonl")
    refused("data", "synth", "nowhere", *made, *options, field=field)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--engine", "tgi"), "engine"),
        (("--chat-template", "none.jinja"), "chat_template"),
        (("--chat-template-arg", "think=true"), None),
        (("--url", "http://h/v1", "--head", "x"), "head"),
        (("--url", "http://h/v1", "--engine", "vllm"), "engine"),
        (("--url", "http://h/v1", "--chat-template", "x"), "chat_template"),
        (("--url", "http://h/v1", "--api-key-env", "NOT_SET"), "api_key_env"),
        (("--url", "h:8000"), "url"),
        (("--batch", 0), "batch"),
        (("--limit", 0), "limit"),
        (("--workers", 0), "workers"),
        (("--prompts", "none.jsonl"), "prompts"),
    ],
)
def test_regenerate_options(
    refused, target: Path, prompts: Path, tmp_path: Path, options: tuple[object, ...], field: str
) -> None:
    where = ("--prompts", prompts, "--output", tmp_path / "made.jsonl")
    refused("data", "regenerate", target, *where, *options, field=field)


def test_vllm_that_is_not_installed(
    refused, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    where = ("--prompts", prompts, "--output", tmp_path / "made.jsonl", "--engine", "vllm")
    line = refused("data", "regenerate", target, *where)
    assert "pip install 'peagle[vllm]'" in line and "--url" in line


def test_show_what_is_not_there(refused, target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"messages": TALK}, {"messages": TALK[:1]})
    whose = ("--target", target)
    refused("data", "show", tmp_path / "none.jsonl", *whose, field="file")
    refused("data", "show", file, *whose, "--record", 3, field="record")
    assert "no assistant turn" in refused("data", "show", file, *whose, "--record", 2)
    assert "'x': unknown model" in refused("data", "show", file, "--target", "x")
    file.write_text("{}\n{broken\n")
    assert f"{file}:2: not JSON" in refused("data", "show", file, *whose)


def test_values_are_read_as_yaml() -> None:
    texts = ["a=false", "b=False", "c=low", "d=3", "e=x=y"]
    assert read_pairs(texts, "mix") == {"a": False, "b": False, "c": "low", "d": 3, "e": "x=y"}
    assert _mix("chat=2, code=0.5") == {"chat": 2, "code": 0.5}
    with refused("mix"):
        read_pairs(["=1"], "mix")
