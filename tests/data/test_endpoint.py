"""Answers from endpoints that fail in every way: nothing is lost, nothing is doubled."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from chat_server import ChatServer, Reply, echo, says
from json_files import read_lines
from refusals import refused
from tiny import make_tokenizer

from peagle.data import endpoint
from peagle.data.chat import PLAIN_STYLE, Conversation, Style
from peagle.data.dataset import read_examples
from peagle.data.endpoint import MAX_TRIES, Endpoint, Servers, connect
from peagle.data.regenerate import Report, regenerate
from peagle.engine.params import SamplingParams

PARAMS = SamplingParams(max_tokens=9, seed=5)
TURNS = [["the cat"], ["the hat", "and then", "what"], ["a day"], ["mat", "sat"], ["ran"], ["far"]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def talks(turns: list[list[str]], style: Style = PLAIN_STYLE) -> list[Conversation]:
    return [Conversation([[user(text)] for text in texts], style) for texts in turns]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSES", (0.0,) * 7)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


@pytest.fixture
def dead() -> str:
    """A URL where nothing listens."""
    server = ChatServer()
    server.server_close()
    return server.url


def ask(server: ChatServer | Servers, output: Path, turns: Any = TURNS, workers: int = 3) -> Report:
    """Regenerate from a server."""
    if isinstance(server, ChatServer):
        server = connect([server.url], workers=workers)
    conversations = turns if isinstance(turns[0], Conversation) else talks(turns)
    return regenerate(server, conversations, output, PARAMS)


def read(output: Path) -> dict[int, dict[str, Any]]:
    """Lines by record, of which there must be one each."""
    lines = read_lines(output)
    by_record = {line["record"]: line for line in lines}
    assert len(by_record) == len(lines)
    return by_record


def check(output: Path, records: set[int] | None = None) -> None:
    """Every answer is the echo of its turn, in its place."""
    found = read(output)
    assert set(found) == (set(range(len(TURNS))) if records is None else records)
    for record, line in found.items():
        texts = [m["content"] for m in line["messages"]]
        assert texts[::2] == TURNS[record]
        assert texts[1::2] == [f"you said {text}" for text in TURNS[record]]
        assert line["answers"] == len(TURNS[record])


def failing(reply: Reply, times: int, words: str = "") -> Callable[[dict[str, Any]], Reply]:
    """An echo that first sends `reply` so many times, to requests with `words` in them."""
    lock, left = threading.Lock(), [times]

    def behave(body: dict[str, Any]) -> Reply:
        with lock:
            fails = left[0] > 0 and words in body["messages"][-1]["content"]
            left[0] -= fails
        return reply if fails else echo(body)

    return behave


@pytest.mark.parametrize("workers", [1, 8])
def test_every_record_is_one_line(server: ChatServer, tmp_path: Path, workers: int) -> None:
    output = tmp_path / "new" / "out.jsonl"
    assert ask(server, output, workers=workers) == Report(9, 0, 0, [])
    check(output)
    assert ask(server, output).answers == 0, "again, nothing is left to ask"
    assert len(server.bodies) == 9
    examples = read_examples(output, make_tokenizer(), 256)
    assert len(examples) == len(TURNS)


def test_the_body_of_a_request(server: ChatServer, tmp_path: Path) -> None:
    tools, style = [{"type": "function"}], {"enable_thinking": False}
    call = {"function": {"name": "look", "arguments": {"at": "mat"}}, "type": "function", "id": "c"}
    asks = [[user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]]
    asks[0].append({"role": "tool", "content": "sat", "tool_call_id": "c"})
    servers = connect([server.url + "/chat/completions"], api_key="secret")
    assert ask(servers, tmp_path / "out", [Conversation(asks, Style(tools, style))]).answers == 1
    [body] = server.bodies
    sent = body.pop("messages")
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"at": "mat"}'
    assert sent[2] == asks[0][2]
    expected = {"model": "m", "temperature": 0.0, "top_p": 1.0, "max_tokens": 9, "seed": 5}
    assert body == {**expected, "tools": tools, "chat_template_kwargs": style}
    assert server.headers[0]["authorization"] == "Bearer secret"
    line = read(tmp_path / "out")[0]
    assert (line["tools"], line["template_args"]) == (tools, style)
    assert line["messages"][1]["tool_calls"] == [call]


def test_a_record_that_begins_with_a_call(server: ChatServer, tmp_path: Path) -> None:
    """The user has no turn before the first answer."""
    call = {"function": {"name": "look", "arguments": {}}, "type": "function"}
    asks = [{"role": "assistant", "content": "", "tool_calls": [call]}, user("mat")]
    asks[1]["role"] = "tool"
    assert ask(server, tmp_path / "out", [Conversation([asks])]) == Report(1, 0, 0, [])
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["assistant", "tool"]


def test_plain_requests_have_nothing_special(server: ChatServer, tmp_path: Path) -> None:
    ask(server, tmp_path / "out", [["hi"]])
    assert set(server.bodies[0]) == {
        "model", "messages", "temperature", "top_p", "max_tokens", "seed"
    }  # fmt: skip
    assert "authorization" not in server.headers[0]


def test_thoughts_and_calls_are_kept_but_not_sent_again(server: ChatServer, tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    server.behave = lambda body: says(None, reasoning="hm", tool_calls=[call])
    ask(server, tmp_path / "out", [["a", "b"]])
    said = read(tmp_path / "out")[0]["messages"][1]
    assert (said["content"], said["reasoning_content"]) == ("", "hm")
    assert said["tool_calls"][0]["function"]["arguments"] == {"at": 1}
    assert "reasoning_content" not in server.bodies[1]["messages"][1]


@pytest.mark.parametrize(
    "reply",
    [
        Reply({"error": "overloaded"}, 503),
        Reply({"error": "slow down"}, 429),
        Reply({"error": "oops"}, 500),
        Reply(None),
        Reply(b"<html>"),
        Reply({"choices": []}),
        Reply({"choices": [{"message": "hi"}]}),
        Reply([1]),
    ],
)
def test_failed_requests_are_sent_again(server: ChatServer, tmp_path: Path, reply: Reply) -> None:
    server.behave = failing(reply, 3)
    assert ask(server, tmp_path / "out") == Report(9, 0, 0, [])
    check(tmp_path / "out")
    assert len(server.bodies) == 12


def test_a_retried_conversation_goes_on_where_it_was(server: ChatServer, tmp_path: Path) -> None:
    server.behave = failing(Reply({}, 503), 2, "what")
    ask(server, tmp_path / "out")
    check(tmp_path / "out")
    asked = Counter(body["messages"][-1]["content"] for body in server.bodies)
    assert asked.pop("what") == 3
    assert set(asked.values()) == {1}


def test_others_take_a_dead_endpoints_work(server: ChatServer, dead: str, tmp_path: Path) -> None:
    """One that dies before its first answer."""
    servers = connect([server.url])
    gone = Servers([Endpoint(dead, "m"), *servers.endpoints], workers=2)
    with_gone = ask(gone, tmp_path / "two")
    assert (with_gone.answers, with_gone.failed) == (9, 0)
    assert all(dead in problem for problem in with_gone.problems)
    check(tmp_path / "two")


def test_the_end_does_not_wait_for_a_worker_that_pauses(
    server: ChatServer, dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PAUSES", (3600.0,))
    both = Servers([Endpoint(dead, "m"), Endpoint(server.url, "m")], workers=2)
    assert ask(both, tmp_path / "out") == Report(9, 0, 0, [])
    check(tmp_path / "out")


def test_a_url_without_an_answer_is_named(server: ChatServer, dead: str) -> None:
    with refused("url") as error:
        connect([server.url, dead])
    assert error.value.value == dead


@pytest.mark.parametrize("url", ["localhost:8000/v1", "http://", "ftp://host/v1", ":"])
def test_bad_urls(url: str) -> None:
    with refused("url"):
        connect([url])


def test_an_endpoint_that_dies_keeps_its_answers(server: ChatServer, tmp_path: Path) -> None:
    """And the next run asks for the rest only."""
    output, answered = tmp_path / "out.jsonl", iter(range(4))
    server.behave = lambda body: Reply(None) if next(answered, None) is None else echo(body)
    with refused("url") as error:
        ask(server, output)
    assert f"{server.url} was given up: no answer" in error.value.why
    kept = set(read(output))
    assert 0 < len(kept) < len(TURNS)
    state = f"{len(TURNS) - len(kept)} records are left, {len(kept)} were answered"
    assert state in error.value.why
    check(output, kept)
    server.behave = echo
    server.bodies.clear()
    ask(server, output)
    check(output)
    again = {body["messages"][0]["content"] for body in server.bodies}
    assert again == {TURNS[record][0] for record in range(len(TURNS)) if record not in kept}


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_error_of_all_requests_ends_it(server: ChatServer, tmp_path: Path, status: int) -> None:
    server.behave = lambda body: Reply({"error": {"message": "wrong key\nor model"}}, status)
    with refused("url") as error:
        ask(server, tmp_path / "out", workers=1)
    assert f"HTTP {status}" in error.value.why
    assert len(server.bodies) == 1


@pytest.mark.parametrize(("status", "tries"), [(500, MAX_TRIES), (400, 1), (422, 1)])
def test_a_record_that_always_fails_is_left_out(
    server: ChatServer, tmp_path: Path, status: int, tries: int
) -> None:
    server.behave = failing(Reply({"error": "cats"}, status), 99, "sat")
    report = ask(server, tmp_path / "out")
    assert (report.answers, report.failed) == (7, 1)
    [problem] = report.problems
    assert problem.startswith(f"record 4: HTTP {status}") and "cats" in problem
    check(tmp_path / "out", {0, 1, 2, 4, 5})
    assert sum(body["messages"][-1]["content"] == "sat" for body in server.bodies) == tries
    server.behave = echo
    assert ask(server, tmp_path / "out").answers == 2
    check(tmp_path / "out")


def test_an_answer_with_half_of_a_surrogate_pair_is_left_out(
    server: ChatServer, tmp_path: Path
) -> None:
    """UTF-8 has no such character: no file can hold it."""
    server.behave = lambda body: says("mat \ud83d") if "sat" in str(body) else echo(body)
    report = ask(server, tmp_path / "out")
    assert (report.answers, report.failed) == (7, 1)
    check(tmp_path / "out", {0, 1, 2, 4, 5})


def test_settings_that_every_request_is_refused_for(server: ChatServer, tmp_path: Path) -> None:
    server.behave = lambda body: Reply({"error": "no chat_template_kwargs here"}, 400)
    with refused("url"):
        ask(server, tmp_path / "out", talks([["hi"]] * 99), workers=2)
    assert len(server.bodies) == 2 * (len(endpoint.PAUSES) + 1)


def in_context(words: int) -> Callable[[dict[str, Any]], Reply]:
    """A server with a context of so many words, wanted tokens counting as words."""

    def behave(body: dict[str, Any]) -> Reply:
        taken = sum(len(m["content"].split()) for m in body["messages"])
        if taken + body.get("max_tokens", 1) > words:
            return Reply({"message": f"maximum context length is {words}"}, 400)
        return echo(body)

    return behave


def test_a_conversation_too_long_for_the_server(server: ChatServer, tmp_path: Path) -> None:
    """First a shorter answer is asked for, then the rest is left out, and counted."""
    server.behave = in_context(20)
    long = "the cat sat on the mat"  # with its answer 14 words
    turns = [["hi", long], [long, long], [long * 5, "hi"]]
    assert ask(server, tmp_path / "out", turns) == Report(3, 3, 0, [])
    lines = read_lines(tmp_path / "out")
    found = {line["record"]: (len(line["messages"]), line["answers"]) for line in lines}
    assert found == {0: (4, 2), 1: (2, 1)}
    assert {"max_tokens" in body for body in server.bodies} == {True, False}


def test_a_body_too_large_for_the_server(server: ChatServer, tmp_path: Path) -> None:
    server.behave = failing(Reply({"error": "shorten it"}, 413), 99, "sat")
    assert ask(server, tmp_path / "out") == Report(8, 1, 0, [])
    assert read(tmp_path / "out")[3]["answers"] == 1


def test_a_bug_ends_it(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_body", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        ask(server, tmp_path / "out")


def test_the_model_of_an_endpoint(server: ChatServer) -> None:
    def serving(*names: object) -> Reply:
        return Reply({"data": [{"id": name} for name in names]})

    server.models = serving("a")
    assert connect([server.url + "/"]).endpoints == [Endpoint(server.url, "a")]
    assert connect([server.url], "mine").endpoints[0].model == "mine"
    server.models = serving("a", "b")
    assert connect([server.url], prefer="b").endpoints[0].model == "b"
    with refused("url"):
        connect([server.url], prefer="c")
    for server.models in (serving(1, 2), serving(), Reply({"models": []}), Reply({}, 404)):
        with refused("url"):
            connect([server.url])
    assert connect([server.url], "mine").endpoints[0].model == "mine", "there is no list"
    server.models = Reply({"error": "who are you"}, 401)
    with refused("url"):
        connect([server.url], "mine")
