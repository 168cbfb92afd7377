"""Answers from OpenAI-compatible chat endpoints, several requests at a time.

A worker is a thread that asks one endpoint. A request that fails goes back to the queue, where any
worker may take it, and the worker pauses, longer each time; when it has failed once more than there
are pauses, in a row, it stops. The run ends when every record is answered or no worker is left.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import PriorityQueue, Queue
from typing import Any, NamedTuple

import httpx2 as httpx

from peagle.data.chat import Message, to_messages
from peagle.data.conversation import Talk, drop_oldest
from peagle.engine.params import SamplingParams
from peagle.errors import InputError, first_line

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds after the first, second … failure in a row
TRIES = 4  # of one record, where the server answered with an error or not in time
TIMEOUT = httpx.Timeout(30.0, read=900.0)  # an answer may queue behind many others
UNAVAILABLE = (429, 502, 503)  # the server has no fault to find with the request
WRONG_SETTINGS = (401, 403, 404, 405)  # every request would fail


class Endpoint(NamedTuple):
    """Where a model is served: the base URL, which ends in /v1 as a rule, and its name there."""

    url: str
    model: str


class Servers(NamedTuple):
    """Endpoints that answer, and how many requests each has at a time."""

    endpoints: list[Endpoint]
    workers: int = 8
    api_key: str | None = None
    problems: tuple[str, ...] = ()  # endpoints that were given and cannot be used


class RequestError(Exception):
    """An attempt that failed; the text says how."""

    def __init__(self, why: str, *, status: int = 0, wait: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.wait = status, wait  # HTTP status, 0: none came; seconds to wait at least


@dataclass(slots=True)
class _Work:
    """What workers share."""

    params: SamplingParams
    tasks: PriorityQueue[tuple[int, Talk | None]] = field(default_factory=PriorityQueue)
    results: "Queue[Talk | _GivenUp | _Stopped | Exception]" = field(default_factory=Queue)
    stop: threading.Event = field(default_factory=threading.Event)


class _GivenUp(NamedTuple):
    talk: Talk
    why: str


class _Stopped(NamedTuple):
    endpoint: Endpoint
    why: str


def connect(
    urls: Sequence[str],
    model: str | None = None,
    *,
    prefer: str = "",
    workers: int = 8,
    api_key: str | None = None,
) -> Servers:
    """Look at every endpoint: does it answer, and which model does it serve? `model` None takes
    the only one, or the one named `prefer`.

    Raises InputError when none can be used, or the model must be named.
    """
    endpoints, problems = [], list[str]()
    with _client(api_key) as client:
        for url in urls:
            base = url.rstrip("/").removesuffix("/chat/completions")
            try:
                served = _served(client, base)
            except RequestError as error:
                if error.status in WRONG_SETTINGS[2:] and model is not None:
                    served = []  # it has no list of models, which is no reason to refuse
                else:
                    problems.append(f"--url {url}: {error}")
                    continue
            endpoints.append(Endpoint(base, model or _choose(url, served, prefer)))
    if not endpoints:
        raise InputError("; ".join(problems))
    return Servers(endpoints, workers, api_key, tuple(problems))


def ask_servers(
    servers: Servers, todo: Sequence[Talk], params: SamplingParams, problems: list[str]
) -> Iterator[list[Talk]]:
    """Records as they are finished. What goes wrong with a record or an endpoint is added to
    `problems`. Raises InputError when no worker is left and records are."""
    problems += servers.problems
    work = _Work(params)
    for talk in todo:
        work.tasks.put((talk.record, talk))
    with _client(servers.api_key) as client:
        where = [endpoint for _ in range(servers.workers) for endpoint in servers.endpoints]
        for endpoint in where:
            arguments = (client, endpoint, work)
            threading.Thread(target=_worker, args=arguments, daemon=True).start()
        try:
            yield from _collect(work, len(todo), len(where), problems)
        finally:
            work.stop.set()
            for worker, _ in enumerate(where):
                work.tasks.put((-1 - worker, None))


def _collect(work: _Work, records: int, workers: int, problems: list[str]) -> Iterator[list[Talk]]:
    answered = 0
    while records:
        result = work.results.get()
        if isinstance(result, Exception):
            raise result
        if isinstance(result, _Stopped):
            workers -= 1
            _note(problems, f"{result.endpoint.url} was given up: {result.why}")
            if not workers:
                left = f"{records} records are left, {answered} were answered and are kept"
                raise InputError(f"{problems[-1]} ({left}): run again to continue")
            continue
        records -= 1
        if isinstance(result, _GivenUp):
            _note(problems, f"record {result.talk.record + 1}: {result.why}")
        else:
            answered += 1
            yield [result]


def _note(problems: list[str], problem: str) -> None:
    if problem not in problems:
        problems.append(problem)


def _worker(client: httpx.Client, endpoint: Endpoint, work: _Work) -> None:
    failures = 0
    try:
        while True:
            _, talk = work.tasks.get()  # the first record, or nothing: the end
            if talk is None or work.stop.is_set():
                return
            try:
                while talk.open:
                    _answer(client, endpoint, talk, work.params)
            except RequestError as error:
                failures += 1
                _hand_back(talk, error, work)
                if error.status in WRONG_SETTINGS or failures > len(PAUSES):
                    work.results.put(_Stopped(endpoint, str(error)))
                    return
                work.stop.wait(max(PAUSES[failures - 1], error.wait))
            else:
                failures = 0
                work.results.put(talk)
    except Exception as error:  # a bug must not leave the run waiting for this worker
        work.results.put(error)


def _hand_back(talk: Talk, error: RequestError, work: _Work) -> None:
    """Back to the queue; given up when this request is at fault, or seems to be."""
    at_fault = error.status not in (0, *UNAVAILABLE, *WRONG_SETTINGS)
    talk.tries += at_fault
    refused = at_fault and error.status < 500
    if refused or talk.tries >= TRIES:
        work.results.put(_GivenUp(talk, str(error)))
    else:
        work.tasks.put((talk.record, talk))


def _answer(client: httpx.Client, endpoint: Endpoint, talk: Talk, params: SamplingParams) -> None:
    """One turn. A conversation that the server finds too long for its context is asked for a
    shorter answer, then without its oldest turns."""
    messages, limits = talk.asked(), [params.max_tokens, None]
    while True:
        for max_tokens in limits:
            body = _body(endpoint, messages, talk, params, max_tokens)
            try:
                talk.say(messages, _ask(client, endpoint, body), {})
                return
            except RequestError as error:
                if error.status not in (400, 413) or "context" not in str(error).lower():
                    raise
        shorter = drop_oldest(messages)
        if shorter is None:
            talk.skip()
            return
        messages = shorter


def _body(
    endpoint: Endpoint,
    messages: list[Message],
    talk: Talk,
    params: SamplingParams,
    max_tokens: int | None,
) -> dict[str, Any]:
    tools, args = talk.conversation.style
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    body = {
        "model": endpoint.model,
        "messages": [_on_the_wire(m, index < last) for index, m in enumerate(messages)],
        "temperature": params.temperature,
        "top_p": params.top_p,
        "max_tokens": max_tokens,
        "seed": params.seed,
        "tools": tools,
        "chat_template_kwargs": dict(args) or None,
    }
    return {name: value for name, value in body.items() if value is not None}


def _on_the_wire(message: Message, past: bool) -> Message:
    """As the API has messages: the arguments of a tool call are JSON in a text, and what was
    thought before earlier answers is not repeated (some endpoints refuse it)."""
    hidden = ("reasoning_content", "thinking") if past else ()
    sent = {key: value for key, value in message.items() if key not in hidden}
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**said, "arguments": json.dumps(said["arguments"])}}
            for call in sent["tool_calls"]
            if (said := call["function"])
        ]
    return sent


def _ask(client: httpx.Client, endpoint: Endpoint, body: dict[str, Any]) -> Message:
    answer = _json(client, "POST", f"{endpoint.url}/chat/completions", body)
    try:
        said = answer["choices"][0]["message"]
        message = {"role": "assistant", "content": said.get("content") or ""}
        message["tool_calls"] = said.get("tool_calls")
        message["reasoning_content"] = said.get("reasoning_content") or said.get("reasoning")
        return to_messages({"messages": [message]})[0]
    except (KeyError, IndexError, TypeError, AttributeError, InputError) as error:
        raise RequestError("the answer is not a chat completion", status=500) from error


def _served(client: httpx.Client, base: str) -> list[str]:
    answer = _json(client, "GET", f"{base}/models")
    try:
        return [entry["id"] for entry in answer["data"]]
    except (KeyError, TypeError) as error:
        raise RequestError("no list of models there: is it the API's base URL?") from error


def _choose(url: str, served: list[str], prefer: str) -> str:
    if prefer in served:
        return prefer
    if len(served) != 1:
        raise InputError(f"--url {url} serves {', '.join(served)}: choose one with --model")
    return served[0]


def _json(client: httpx.Client, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    try:
        response = client.request(method, url, json=body)
        if response.is_success:
            return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        late = isinstance(error, httpx.ReadTimeout)
        raise RequestError(f"no answer ({first_line(error)})", status=504 * late) from error
    said = " ".join(response.text.split())[:300]
    wait = response.headers.get("retry-after", "")
    raise RequestError(
        f"HTTP {response.status_code} {response.reason_phrase}: {said}",
        status=response.status_code,
        wait=min(float(wait), 300.0) if wait.isdigit() else 0.0,
    )


def _client(api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(headers=headers, timeout=TIMEOUT, limits=httpx.Limits())
