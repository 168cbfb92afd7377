"""`peagle data`: what it makes can be looked at, and trained on."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from json_files import read_lines, write_lines
from refusals import refused
from runner import Words, invoke, metrics, printed

from peagle.cli.data import template_args
from peagle.engine.params import SamplingParams

SMALL = ("--layers", 1, "--depths", 2, "--draft-vocab", 100)
USER = ("--max-tokens", 8)
TALKATIVE = SamplingParams(temperature=1.2, max_tokens=48)  # user turns of a tiny target
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


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
    records = read_lines(made)
    assert [record["record"] for record in records] == [0, 0, 1]
    assert [len(record["messages"]) for record in records] == [2, 4, 2]
    assert f"wrote 0 answers to {made}" in invoke(*command).stderr

    invoke("train", target, "--data", made, "--output", tmp_path / "out", *SMALL)
    assert len(metrics(tmp_path / "out")) == 3  # one epoch: a step a document


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.data.synth.USER", TALKATIVE)


def test_data_from_nothing_can_be_trained_on(target: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.jsonl"
    command = ("data", "synth", target, "--output", made, *USER)
    done = invoke(*command, "--count", 3)
    assert f"wrote 3 records to {made}, which has " in done.stderr
    assert "drafts not used: " in done.stderr
    assert "wrote 0 records" in invoke(*command, "--count", 3).stderr
    summary = printed("data", "show", made, "--target", target)
    assert summary["records"] == 3
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
    records = read_lines(made)
    assert [record["template_args"] for record in records] == [{"think": False}] * 3
    shown = printed("data", "show", made, "--target", target, "--record", 1)["documents"][0]
    start = "quick system: be brief<|im_end|>user: the cat<|im_end|>assistant: "
    assert shown["pieces"][0] == {"text": start, "supervised": False}

    synth = tmp_path / "synth.jsonl"
    how = (*how[:-1], synth)
    invoke("data", "synth", target, *USER, *how, "--count", 1)
    [record] = read_lines(synth)
    assert record["template_args"] == {"think": False}
    assert record["messages"][0] == {"role": "system", "content": "be brief"}


def test_turns_that_do_not_fit_are_counted(target: Path, tmp_path: Path) -> None:
    long = "the cat sat " * 36
    turns = [[long, "ran", long], ["the cat sat " * 99]]
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"turns": texts} for texts in turns))
    made = ("--output", tmp_path / "made.jsonl", "--max-tokens", 4)
    said = invoke("data", "regenerate", target, "--prompts", prompts, *made).stderr
    assert "wrote 2 answers" in said
    assert "turns left out, too long to answer or failed: 2" in said


def test_prompts_of_several_sources(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order; with weights drawn by the seed until one has no more."""
    rows = [{"question": f"{word} day"} for word in ("cat", "hat", "mat", "ran", "sat")]

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> object:
        assert (name, config, split) in {("o/n", None, "train"), ("o/n", "main", "test")}
        assert streaming
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))

    def asked(name: str, *options: object) -> list[str]:
        made = tmp_path / name
        command = ("data", "regenerate", target, "--output", made, "--max-tokens", 1)
        invoke(*command, *options)
        return [record["messages"][-2]["content"] for record in read_lines(made)]

    hub = ("--prompts", "o/n/main/test")
    every = [row["question"] for row in rows]
    assert asked("both", "--prompts", prompts, *hub) == ["the cat", "ran", "mat", *every]
    mixed = ("--prompts", f"{prompts}=1", "--prompts", "o/n=2")
    first = asked("mixed", *mixed)
    assert first == asked("again", *mixed)
    drawn = [text for text in first if text in every]
    assert len(first) > len(drawn) > 1 and drawn == every[: len(drawn)]
    assert first != asked("other", *mixed, "--seed", 7)


def test_files_in_the_home_folder(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files = (f"--prompts=~/{prompts.name}", "--output=~/made.jsonl")
    invoke("data", "regenerate", target, *files, "--max-tokens", 1)
    assert len(read_lines(tmp_path / "made.jsonl")) == 3


def test_a_smaller_limit_of_several_sources(target: Path, tmp_path: Path) -> None:
    """Answers after it stay; they are none to other prompts."""
    made = tmp_path / "made.jsonl"
    command: Words = ("data", "regenerate", target, "--output", made, "--max-tokens", 1)
    for name in ("one", "two"):
        records = ({"turns": [f"{name} {word}"]} for word in ("cat", "hat", "mat"))
        command = (*command, "--prompts", write_lines(tmp_path / f"{name}.jsonl", *records))
    for limit, written in ((3, 3), (2, 0), (4, 1)):
        assert f"wrote {written} answers" in invoke(*command, "--limit", limit).stderr
    asked = [record["messages"][0]["content"] for record in read_lines(made)]
    assert asked == ["one cat", "one hat", "one mat", "two cat"]


def test_no_more_prompts_are_read_than_are_answered(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield from ({"question": word} for word in ("cat", "hat"))
        raise AssertionError("a third one is read")

    hub = SimpleNamespace(load_dataset=lambda *_, **__: rows())
    monkeypatch.setitem(sys.modules, "datasets", hub)
    command = ("data", "regenerate", target, "--prompts", "o/n", "--prompts", prompts)
    made = ("--output", tmp_path / "made.jsonl", "--max-tokens", 1, "--limit", 2)
    assert "wrote 2 answers" in invoke(*command, *made).stderr


def test_a_hub_that_cannot_be_read(
    refused, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("data", "regenerate", target, "--prompts", "o/n", "--output", tmp_path / "made")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'peagle[data]'" in refused(*command)

    unreached = Mock(side_effect=ConnectionError("no such host"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreached))
    assert "o/n: cannot be read from the hub (no such host)" in refused(*command)
    assert not (tmp_path / "made").exists()


def test_show_a_file(target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"messages": TALK}, {"messages": TALK[:1]})
    shown = invoke("data", "show", file, "--target", target).stdout.splitlines()
    numbers = dict(line.split(maxsplit=1) for line in shown[:1] + shown[-2:-1])
    assert numbers == {"records": "2", "unusable": "1"}
    assert shown[-1] == "  record 2: the conversation has no assistant turn to train on"
    summary = printed("data", "show", file, "--target", target)
    assert f"answer tokens  {summary['answer_tokens']}" in shown
    assert f"p50 {summary['lengths']['p50']}," in "\n".join(shown)


def test_show_a_record(target: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--count", 0), "count"),
        (("--max-tokens", 0), "max_tokens"),
        (("--chat-template-arg", "think"), "chat_template_arg"),
        (("--chat-template-arg", "a=["), "chat_template_arg"),
        (("--output", "made.jsonl.gz"), "output"),
    ],
)
def test_synth_options(refused, tmp_path: Path, options: Words, field: str) -> None:
    """All of them before a target is loaded."""
    made = ("--output", tmp_path / "made.jsonl")
    refused("data", "synth", "nowhere", *made, *options, field=field)


def test_other_formats_of_answers(refused, prompts: Path) -> None:
    command = ("data", "regenerate", "nowhere", "--prompts", prompts)
    refused(*command, "--output", "made.parquet", field="output")


def test_synth_refuses_arguments_that_the_template_does_not_read(refused, target, tmp_path) -> None:
    how = ("--output", tmp_path / "made.jsonl", "--count", 1, "--chat-template-arg", "think=true")
    refused("data", "synth", target, *how, field="chat_template_arg")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--chat-template", "none.jinja"), "chat_template"),
        (("--chat-template-arg", "think=true"), None),
        (("--url", "http://h/v1", "--head", "x"), "head"),
        (("--url", "http://h/v1", "--chat-template", "x"), "chat_template"),
        (("--url", "http://h/v1", "--dtype", "float32"), "dtype"),
        (("--url", "http://h/v1", "--device", "cpu"), "device"),
        (("--url", "http://h/v1", "--force"), "force"),
        (("--model", "theirs"), "model"),
        (("--workers", 8), "workers"),
        (("--api-key-env", "KEY"), "api_key_env"),
        (("--url", "http://h/v1", "--api-key-env", "NOT_SET"), "api_key_env"),
        (("--url", "h:8000"), "url"),
        (("--limit", 0), "limit"),
        (("--workers", 0), "workers"),
        (("--prompts", "none.jsonl"), "prompts"),
        (("--prompts", "none.jsonl=2"), "prompts"),
        (("--prompts", "owner/name=-1"), "prompts"),
        (("--prompts", "owner/name=much"), "prompts"),
    ],
)
def test_regenerate_options(
    refused, target: Path, prompts: Path, tmp_path: Path, options: Words, field: str
) -> None:
    where = ("--prompts", prompts, "--output", tmp_path / "made.jsonl")
    refused("data", "regenerate", target, *where, *options, field=field)


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
    """A date is a text, as no JSON has dates."""
    texts = ["a=false", "b=False", "c=low", "d=3", "e=x=y"]
    assert template_args(texts) == {"a": False, "b": False, "c": "low", "d": 3, "e": "x=y"}
    assert template_args(["day=2024-07-26"]) == {"day": "2024-07-26"}
    for text in ("=1", "a=2024-13-45", "a={2024-07-26: 1}", "a=&x [*x]"):
        with refused("chat_template_arg"):
            template_args([text])
