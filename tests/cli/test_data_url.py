"""`peagle data regenerate --url`: no target is loaded. (Runs that are killed: data/test_endpoint.py
and data/test_regenerate.py.)"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_server import ChatServer, Reply, echo
from json_files import read_lines, write_lines
from runner import Words, invoke

COUNT = 12


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


@pytest.fixture
def command(server: ChatServer, tmp_path: Path) -> Words:
    prompts = ({"turns": [f"question {number}"]} for number in range(COUNT))
    where = ("--prompts", write_lines(tmp_path / "prompts.jsonl", *prompts))
    where = (*where, "--output", tmp_path / "made.jsonl")
    return ("data", "regenerate", "some-target", *where, "--url", server.url)


def test_options_reach_the_server(server: ChatServer, command: Words, tmp_path: Path) -> None:
    key = ("--api-key-env", "SOME_KEY", "--model", "theirs", "--system", "be brief")
    done = invoke(*command, *key, env={"SOME_KEY": "secret"})
    assert f"wrote {COUNT} answers" in done.stderr
    assert {body["model"] for body in server.bodies} == {"theirs"}
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    made = read_lines(tmp_path / "made.jsonl")
    roles = {message["role"] for line in made for message in line["messages"]}
    assert roles == {"system", "user", "assistant"}


def test_failed_records_are_asked_again(server: ChatServer, command: Words, tmp_path: Path) -> None:
    server.behave = lambda body: (
        Reply("no such number", 400) if "7" in body["messages"][-1]["content"] else echo(body)
    )
    done = invoke(*command, code=1)
    assert "warning: record 8: HTTP 400" in done.stderr
    assert "records without an answer: 1; run again" in done.stderr
    server.behave = echo
    assert "wrote 1 answers" in invoke(*command).stderr
    assert {line["record"] for line in read_lines(tmp_path / "made.jsonl")} == set(range(COUNT))


def test_no_such_host(refused, server: ChatServer, command: Words) -> None:
    server.server_close()
    refused(*command, field="url")


def test_a_wrong_key(refused, server: ChatServer, command: Words) -> None:
    server.models = Reply({"error": "who are you?"}, 401)
    assert "HTTP 401 Unauthorized" in refused(*command)
