"""Any server behind a URL: ours (a real one), one that counts nothing, one that stops answering."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from chat_server import ChatServer, Reply
from tiny import make_drafter, make_target

from peagle.bench.client import ChatClient
from peagle.bench.load import AnswerError, Played, closed_loop
from peagle.data.chat import prompt_ids
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Stats
from peagle.server.app import Api, ServerConfig
from peagle.server.run import Server, bind

QUESTIONS = [["the cat"], ["what a day! what a day!"], ["then the other cat ran"]]
BODY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def sse(*events: Any) -> Reply:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return Reply(text.encode(), headers={"content-type": "text/event-stream"})


def streamed(text: str, usage: bool = True) -> Reply:
    events: list[Any] = [{"choices": [{"delta": {"role": "assistant"}}]}]
    events += [{"choices": [{"delta": {"content": letter}}]} for letter in text]
    if usage:
        events.append({"choices": [], "usage": {"completion_tokens": len(text)}})
    return sse(*events)


def played(url: str, questions: list[list[str]] = QUESTIONS, concurrency: int = 2) -> Played:
    async def play() -> Played:
        async with ChatClient(url, BODY) as server:
            return await closed_loop(questions, concurrency, server)

    return asyncio.run(play())


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = make_target()
    how = {"max_batch": 4, "kv_tokens": 1024, "deterministic": True}
    return LLM(target, make_drafter(target, "p-eagle"), k=3, **how)


@pytest.fixture
def url(llm: LLM) -> Iterator[str]:
    listening = bind("127.0.0.1", 0)
    api = Api(llm.use(llm.drafter, 3), ServerConfig("tiny"))
    server = Server(api)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    api.worker.draining = True
    thread.join(30)
    assert not thread.is_alive()


def test_our_server_texts_and_counters(llm: LLM, url: str) -> None:
    """Texts are the engine's, and the difference of the counters is what was drafted meanwhile."""
    played(url)  # counted before
    found = played(url)
    asked = [prompt_ids(llm.tokenizer, [{"role": "user", "content": q[0]}]) for q in QUESTIONS]
    params, total = SamplingParams(max_tokens=12, ignore_eos=True), Stats()
    answers = llm.generate(asked, params)
    for answer in answers:
        total += answer.stats
    output = {s.conversation: s.output for s in found.samples}
    assert [output[i] for i in range(3)] == [answer.text for answer in answers]
    assert found.drafting == total and total.rounds > 0
    assert [s.tokens for s in found.samples] == [12] * 3
    assert all(0 < s.ttft <= s.seconds for s in found.samples)


def test_no_counters_means_unknown() -> None:
    with ChatServer(lambda body: streamed("hello")) as server:
        found = played(server.url)
    assert [s.output for s in found.samples] == ["hello"] * 3
    assert found.drafting == Stats()
    body = server.bodies[0]
    assert body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 12


def test_a_server_that_stops_answering() -> None:
    """Finished answers are kept and no further requests are sent, though the last answer arrives
    after two failures."""
    failed, numbers = threading.Semaphore(0), count(1)

    def behave(body: dict[str, Any]) -> Reply:
        number = next(numbers)
        if number > 4:
            failed.release()
            return Reply(None)
        if number == 4:
            for _ in range(3):  # the third comes after the client knows of two
                failed.acquire(timeout=30)
        return streamed("hello")

    with ChatServer(behave) as server:
        found = played(server.url, [["x"]] * 30)
    assert not found.whole
    assert sum(s.error is None for s in found.samples) == 4
    assert len(server.bodies) < 10


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply({"error": {"message": "no such model"}}, 404), "HTTP 404: .*no such model"),
        (streamed("hi", usage=False), "has no usage"),
        (Reply(b"data: {not json\n\n"), "no answer"),
        (sse({"choices": "?"}), "no answer"),
    ],
)
def test_bad_answers(reply: Reply, why: str) -> None:
    async def ask(url: str) -> None:
        async with ChatClient(url, BODY) as server:
            await server.ask([{"role": "user", "content": "x"}])

    with ChatServer(lambda body: reply) as server, pytest.raises(AnswerError, match=why):
        asyncio.run(ask(server.url))


def test_torch_is_not_imported() -> None:
    code = "import sys, peagle.bench.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
