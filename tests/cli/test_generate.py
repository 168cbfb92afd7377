"""`peagle generate` and `peagle chat`."""

import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
from runner import LAYERS, invoke, printed
from tiny import METHODS, make_target, save_target

from peagle.cli.generate import show
from peagle.cli.main import _warnings_in_a_line, main
from peagle.data.chat import Message, prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Chunk
from peagle.errors import InputWarning

FIELDS = {
    "text", "token_ids", "output_tokens", "rounds", "acceptance_length", "accepted_per_position",
    "tokens_per_second", "finish_reason", "nodes", "rows_per_round", "tokens_per_forward",
    "accepted_from_lookup", "lookup",
}  # fmt: skip
ASK = ("the cat sat", "--max-tokens", 40, "--dtype", "float32")


@pytest.mark.parametrize("method", METHODS)
def test_json_has_the_targets_tokens(target: Path, heads: dict[str, Path], method: str) -> None:
    plain = printed("generate", target, *ASK, "--no-speculation")
    drafted = printed("generate", target, *ASK, "--head", heads[method], "--k", 4)
    assert set(drafted) == set(plain) == FIELDS
    for field in ("text", "token_ids", "output_tokens", "finish_reason"):
        assert drafted[field] == plain[field], field
    assert plain["output_tokens"] == len(plain["token_ids"]) > 1
    assert (plain["rounds"], plain["acceptance_length"]) == (0, 1.0)
    assert 0 < drafted["rounds"] < 40
    assert len(drafted["accepted_per_position"]) == 4
    shares = drafted["accepted_per_position"]
    assert drafted["acceptance_length"] == pytest.approx(1 + sum(shares), abs=1e-3)
    assert drafted["acceptance_length"] > 1
    assert (drafted["nodes"], drafted["lookup"], drafted["accepted_from_lookup"]) == (4, False, 0)
    assert (plain["nodes"], plain["rows_per_round"], plain["tokens_per_forward"]) == (None, 1, 1)
    assert 1 < drafted["tokens_per_forward"] < 5


def test_head_is_not_loaded_for_method_none(target: Path, tmp_path: Path) -> None:
    named = ("--method", "none", "--head", tmp_path / "nowhere")
    assert printed("generate", target, *ASK, *named)["rounds"] == 0


def test_text_is_plain_when_not_a_terminal(target: Path, heads: dict[str, Path]) -> None:
    head = ("--head", heads["p-eagle"])
    text = printed("generate", target, *ASK, *head)["text"]
    shown = invoke("generate", target, *ASK, *head).stdout
    assert shown.startswith(text + "\n")
    last = shown.removeprefix(text + "\n")
    assert "\x1b" not in last
    gained = r"\d+\.\d a round, \d+\.\d\d tokens a target forward, 40 tokens, "
    assert re.match(f"p-eagle, adaptive \\+ lookup, {gained}", last)
    assert last.endswith(" tok/s\n")


def test_accepted_tokens_are_green_on_a_terminal(target: Path, heads: dict[str, Path]) -> None:
    green = "\x1b[32m"
    drafted = invoke("generate", target, *ASK, "--head", heads["p-eagle"], "--k", 4, color=True)
    assert green in drafted.stdout
    plain = invoke("generate", target, *ASK, "--no-speculation", color=True)
    assert green not in plain.stdout
    assert "no drafting" in plain.stdout


def test_without_a_head_lookup_drafts(target: Path) -> None:
    """The last line says so, and what it gained over the whole answer."""
    default = printed("generate", target, *ASK)
    assert default["lookup"]
    for options, drafting in {
        (): "lookup (no head for this model), ",
        ("--method", "lookup"): "lookup, ",
        ("--no-lookup",): "no drafting, ",
        ("--no-speculation",): "no drafting, ",
    }.items():
        [*_, last] = invoke("generate", target, *ASK, *options).stdout.splitlines()
        assert last.startswith(drafting)
        assert ("tokens a target forward" in last) == last.startswith("lookup")
        assert printed("generate", target, *ASK, *options)["token_ids"] == default["token_ids"]


def test_what_the_model_says_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    said = "a\tb :smile: [red]x[/] " + "long " * 40 + "\n  end  "
    show([Chunk(0, said, 1, "head")])
    assert capsys.readouterr().out == said + "\n"


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt])
def test_logs_and_warnings_wait_for_the_end_of_an_answer(
    failure: type[BaseException] | None,
) -> None:
    """On a terminal they would stand in the middle of its text."""

    def answer() -> Iterator[Chunk]:
        yield Chunk(0, "half of", 1, "head")
        logging.lastResort.handle(logging.makeLogRecord({"msg": "a log line"}))  # type: ignore[union-attr]
        warnings.warn(InputWarning("a setting"), stacklevel=1)
        print("a library", file=sys.stderr)
        yield Chunk(0, " a sentence", 1, "head")
        if failure:
            raise failure

    terminal = io.StringIO()
    with (
        redirect_stdout(terminal), redirect_stderr(terminal), _warnings_in_a_line(),
        suppress(KeyboardInterrupt),
    ):  # fmt: skip
        show(answer())
    assert terminal.getvalue().splitlines() == [
        "half of a sentence", "a log line", "warning: a setting", "a library",
    ]  # fmt: skip


def test_json_schema_and_regex(target: Path, heads: dict[str, Path], tmp_path: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["cat", 7]}, "minItems": 3, "maxItems": 3}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))
    head = ("--head", heads["p-eagle"])
    said = printed("generate", target, *ASK, *head, "--json-schema", file)
    assert said["finish_reason"] == "stop"
    assert set(json.loads(said["text"])) <= {"cat", 7} and len(json.loads(said["text"])) == 3
    said = printed("generate", target, *ASK, *head, "--regex", "[xyz]{5}")
    assert re.fullmatch("[xyz]{5}", said["text"])


def test_stop_penalties_and_logprobs(target: Path, heads: dict[str, Path]) -> None:
    head = ("--head", heads["p-eagle"])
    plain = printed("generate", target, *ASK, *head)
    stops = ("--stop", "\x01never", "--stop", plain["text"][5:7])
    stopped = printed("generate", target, *ASK, *head, *stops)["text"]
    assert stopped == plain["text"][: plain["text"].index(plain["text"][5:7])]
    changed = [
        printed("generate", target, *ASK, *head, f"--{kind}-penalty", 2)["token_ids"]
        for kind in ("repetition", "presence", "frequency")
    ]
    assert all(ids != plain["token_ids"] for ids in changed)
    said = printed("generate", target, *ASK, *head, "--logprobs", 2)
    assert set(said) == FIELDS | {"logprobs"}
    assert [entry["token"] for entry in said["logprobs"]] == said["token_ids"] == plain["token_ids"]
    assert all(entry["top"][0] == {k: entry[k] for k in ("token", "logprob")}
               for entry in said["logprobs"]), "greedy: the likeliest is the one"  # fmt: skip


def test_raw_skips_the_chat_template(target: Path) -> None:
    llm = LLM(str(target))
    expected = llm.generate(["the cat sat"], SamplingParams(max_tokens=40))[0].token_ids
    assert printed("generate", target, *ASK, "--raw")["token_ids"] == expected
    assert printed("generate", target, *ASK)["token_ids"] != expected


def test_chat_remembers_the_conversation(target: Path, heads: dict[str, Path]) -> None:
    llm, history, expected = LLM(str(target)), list[Message](), []
    for said in ("the cat", "and the hat"):
        history.append({"role": "user", "content": said})
        ids = prompt_ids(llm.tokenizer, history)
        answer = llm.generate([ids], SamplingParams(max_tokens=12))[0].text
        history.append({"role": "assistant", "content": answer})
        expected.append(answer)
    options = ("--head", heads["p-eagle"], "--max-tokens", 12, "--dtype", "float32")
    shown = invoke("chat", target, *options, stdin="the cat\nand the hat\n").stdout
    first, second = (shown.find(f"> {answer}\n") for answer in expected)
    assert 0 <= first < second
    assert shown.count("tok/s") == 2


def test_chat_ends_at_an_empty_line(target: Path) -> None:
    shown = invoke("chat", target, "--max-tokens", 3, stdin="the cat\n\nnever asked\n").stdout
    assert shown.count("tok/s") == 1


def test_a_line_that_is_no_text(target: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Latin-1, as of a terminal that is set to it: the conversation goes on."""
    monkeypatch.setattr("sys.argv", ["peagle", "chat", str(target), "--max-tokens", "3"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a caf\xe9\nhi\n"), "utf-8"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and capsys.readouterr().out.count("tok/s") == 2


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose logits are no numbers."""
    made = make_target(layers=LAYERS)
    with torch.no_grad():
        made.model.lm_head.weight.fill_(float("nan"))
    return save_target(made, tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        (("generate", "the cat"), ""),
        (("generate", "the cat", "--json"), ""),
        (("chat",), "the cat\nhello\n"),
    ],
)
def test_an_answer_that_fails(
    broken: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    typed: str,
) -> None:
    """One line says why, and the exit code that it did not go well."""
    name, *options = command
    monkeypatch.setattr("sys.argv", ["peagle", name, str(broken), *options, "--no-speculation"])
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 1
    [line] = [line for line in said.err.splitlines() if line.startswith("peagle")]
    assert line == "peagle: the target's logits are NaN or infinite: no token can be chosen"
    if "--json" in options:
        assert json.loads(said.out)["finish_reason"] == "error"
