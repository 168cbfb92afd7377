"""Clients that leave, a full queue, the end, failures: nothing hangs, and memory is freed."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import httpx2
import openai
import pytest
from serving import MODEL, Brake, Running, Serve, all_free, make_llm, until

from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.params import SamplingParams
from peagle.engine.request import Request
from peagle.model.drafter import Drafter
from peagle.server import middleware
from peagle.server.answers import TextBuilder
from peagle.server.responses import TextChoice

LONG: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 200, "temperature": 0}
LONG["extra_body"] = {"ignore_eos": True}
BODY = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}


def formed(regex: str) -> dict[str, Any]:
    """The body of a request whose answer has a form."""
    form = {"structured_outputs": {"regex": regex}}
    return {"prompt": "a", "max_tokens": 3, "temperature": 0, **form}


class Compiler:
    """Holds requests with a regex that is new, and notes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, make = threading.Event(), LLM.make_requests
        self.compiled = list[str]()

        def held(llm: LLM, ids: list[int], params: SamplingParams, *numbers: int) -> list[Request]:
            if params.regex is not None and params.regex not in self.compiled:
                self.compiled.append(params.regex)
                self.go.wait(30)
            return make(llm, ids, params, *numbers)

        monkeypatch.setattr(LLM, "make_requests", held)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler(monkeypatch)
    yield made
    made.go.set()


def test_a_client_that_leaves_frees_everything(serve: Serve, brake: Brake) -> None:
    """A stream closed in its middle, and a request that gives up waiting."""
    running = serve()
    stream = running.client().completions.create(**LONG, stream=True, n=1)
    next(iter(stream))
    brake.go.clear()
    assert running.api.worker.open == 1
    stream.close()
    with pytest.raises(httpx2.ReadTimeout):
        running.post("/v1/completions", json=BODY | {"n": 3, "top_k": 3}, timeout=0.3)
    brake.go.set()
    until(lambda: all_free(running))
    metrics = running.get("/metrics").text
    assert 'finished_reason="length",model_name="tiny"} 0.0' in metrics
    assert 'finished_reason="abort",model_name="tiny"} 4.0' in metrics


def test_a_full_queue(serve: Serve, drafter: Drafter, brake: Brake) -> None:
    """One may run and two wait; the fourth is told to come again, and those before it finish."""
    running = serve(make_llm(drafter, max_batch=1), max_queue=2)
    brake.go.clear()
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(running.complete, "a", max_tokens=3) for _ in range(3)]
        until(lambda: running.api.worker.open == 3)
        with pytest.raises(openai.RateLimitError, match="3 requests run or wait, at most 3") as no:
            running.complete("a")
        assert no.value.response.headers["retry-after"] == "1"
        brake.go.set()
        assert all(one.result().choices for one in asked)
    until(lambda: all_free(running))


def test_the_time_is_over(serve: Serve, drafter: Drafter, brake: Brake) -> None:
    """The output so far is the answer; a request without any gets 503."""
    running = serve(make_llm(drafter, max_batch=1), max_seconds=30)
    brake.go.clear()
    worker, steps = running.api.worker, brake.steps
    with ThreadPoolExecutor(2) as threads:
        ask = partial(threads.submit, running.post, "/v1/completions", json=BODY)
        asked = [ask()]
        until(lambda: brake.steps == steps + 1)  # it is before its first round
        asked.append(ask())
        until(lambda: worker._posted.qsize() == 1)  # it waits to be heard
        worker._max_seconds = 0.0
        brake.go.set()
        first, second = (one.result() for one in asked)
    assert first.status_code == 200
    assert first.json()["choices"][0]["finish_reason"] == "length"
    assert 0 < first.json()["usage"]["completion_tokens"] <= 4
    assert (second.status_code, second.headers["retry-after"]) == (503, "1")
    assert "not begun in time, 30 seconds" in second.json()["error"]["message"]
    until(lambda: all_free(running))
    looked_up = float(first.json()["usage"]["prompt_tokens"])  # nothing for the one that never ran
    queries = f'vllm:prefix_cache_queries_total{{model_name="tiny"}} {looked_up}'
    assert queries in running.get("/metrics").text


def test_the_time_counts_from_the_arrival(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenising a prompt and compiling a grammar are a part of it."""
    running = serve(max_seconds=0.05)
    make_requests = LLM.make_requests

    def slow(*args: Any) -> list[Request]:
        time.sleep(0.1)
        return make_requests(*args)

    monkeypatch.setattr(LLM, "make_requests", slow)
    assert running.post("/v1/completions", json=BODY).status_code == 503


def test_clients_that_leave_before_their_turn(serve: Serve, compiler: Compiler) -> None:
    """Nothing is compiled for them, and they hold no place."""
    running = serve()
    jobs = running.api.worker._jobs
    for regex in ("a+", "b+", "c+"):
        with pytest.raises(httpx2.ReadTimeout):
            running.post("/v1/completions", json=formed(regex), timeout=0.3)
    until(lambda: [job.cancelled for job in list(jobs)] == [True] * 3)
    compiler.go.set()
    until(lambda: all_free(running))
    assert len(compiler.compiled) == 1


def test_the_time_is_over_before_their_turn(serve: Serve, compiler: Compiler) -> None:
    running = serve(max_seconds=30)
    ask = partial(running.post, "/v1/completions")
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, json=formed("a+"))]
        until(lambda: compiler.compiled)
        asked.append(threads.submit(ask, json=formed("b+")))
        until(lambda: running.api.worker.open == 2)
        running.api.worker._max_seconds = 0.0
        compiler.go.set()
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all("not begun in time" in answer.text for answer in answers)
    assert compiler.compiled == ["a+"]


def test_known_forms_do_not_wait_for_others(serve: Serve, compiler: Compiler) -> None:
    running = serve()
    ask = partial(running.post, "/v1/completions")
    compiler.go.set()
    assert ask(json=formed("a+")).status_code == 200
    compiler.go.clear()
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(ask, json=formed("b+"))
        until(lambda: "b+" in compiler.compiled)
        assert ask(json=formed("a+")).status_code == 200 and not slow.done()
        compiler.go.set()
        assert slow.result().status_code == 200


def test_requests_that_are_not_prepared_yet_wait(serve: Serve, compiler: Compiler) -> None:
    running = serve()
    ask = partial(running.post, "/v1/completions")
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, json=formed(regex)) for regex in ("a+", "b+", "c+")]
        until(lambda: running.api.worker.open == 3)
        metrics = running.get("/metrics").text
        compiler.go.set()
        assert [one.result().status_code for one in asked] == [200] * 3
    assert 'vllm:num_requests_waiting{model_name="tiny"} 3.0' in metrics


def test_others_do_not_wait_for_a_long_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probabilities are written in another thread."""
    begun, go, whole = threading.Event(), threading.Event(), TextBuilder.whole

    def slow(builder: TextBuilder) -> TextChoice:
        begun.set()
        go.wait(30)
        return whole(builder)

    monkeypatch.setattr(TextBuilder, "whole", slow)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(running.complete, "a", max_tokens=2, temperature=0)
        assert begun.wait(30)
        assert running.get("/health", timeout=10).status_code == 200
        go.set()
        assert asked.result().choices


def test_a_body_that_does_not_come(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.1)
    host, port = running.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 20\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as http:
        http.sendall(f'{head}{{"prompt": '.encode())
        said = b"".join(iter(lambda: http.recv(4096), b""))  # until the server closes it
    assert said.startswith(b"HTTP/1.1 408 ") and b"the body has not come within" in said


def test_told_to_end_twice(serve: Serve, brake: Brake) -> None:
    """Running requests are cancelled; their answers end."""
    running = serve()
    stream = iter(running.client().completions.create(**LONG, stream=True))
    parts = [next(stream)]
    brake.go.clear()
    for _ in range(2):
        running.server.handle_exit(15, None)
    brake.go.set()
    parts += stream
    assert parts[-1].choices[0].finish_reason == "abort"  # type: ignore[comparison-overlap]
    running.thread.join(30)
    assert not running.thread.is_alive() and all_free(running)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_engine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Every client gets the error, and the server ends; a panic in native code is no Exception."""
    running = serve()
    ticking, on_tick = threading.Event(), running.server.on_tick

    async def late(counter: int) -> bool:
        return ticking.is_set() and await on_tick(counter)

    monkeypatch.setattr(running.server, "on_tick", late)

    def broken(engine: Engine) -> None:
        raise BaseException("out of something")

    monkeypatch.setattr(running.api.llm.engine, "step", broken.__get__(running.api.llm.engine))
    with pytest.raises(openai.APIError, match="the engine has failed"):
        list(running.complete("a", n=2, stream=stream))
    health = running.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert running.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    ticking.set()
    running.thread.join(30)
    assert not running.thread.is_alive() and running.api.worker.failed
    assert "out of something" in caplog.text


def test_a_request_that_is_not_prepared(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    make_requests = LLM.make_requests

    def picky(llm: LLM, ids: list[int], params: SamplingParams, *numbers: int) -> list[Request]:
        if params.top_k == 78:
            raise RuntimeError("a bug")
        return make_requests(llm, ids, params, *numbers)

    monkeypatch.setattr(LLM, "make_requests", picky)
    with pytest.raises(openai.InternalServerError):
        running.complete("a", extra_body={"top_k": 78})
    assert running.complete("a", max_tokens=2).choices
    assert running.api.worker.open == 0


def test_many_at_once(running: Running) -> None:
    """Each gets its own answer, as if alone."""
    prompts = [f"the cat sat on mat {i}" * (i + 1) for i in range(12)]

    def ask(prompt: str, stream: bool) -> str:
        got = running.complete(prompt, max_tokens=9, seed=1, stream=stream)
        return "".join(part.choices[0].text for part in (got if stream else [got]))

    alone = [ask(prompt, False) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(ask, prompts, cycle([True, False]))) == alone
