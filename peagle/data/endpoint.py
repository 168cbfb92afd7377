"""Answers from OpenAI-compatible chat endpoints, several requests at a time.

A worker sends to one endpoint. A record whose request failed goes back to the queue, from which any
worker may take it, and the worker pauses, longer after each failure in a row. After one failure
more than there are pauses the worker stops. The run ends when every record is finished or no worker
is left.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx2 as httpx

from peagle.data.chat import Conversation, Message, check_text, to_messages
from peagle.engine.params import SamplingParams
from peagle.errors import InputError, first_line
from peagle.model.thoughts import THINKING

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds after the first, second … failure in a row
MAX_TRIES = 4  # requests for one record that end with a server error or a timeout
ANSWER_TIMEOUT = httpx.Timeout(30.0, read=900.0)  # an answer may wait in a long queue
UNAVAILABLE = (429, 502, 503)  # the server finds no fault with the request
NO_MODEL_LIST = (404, 405)
WRONG_SETTINGS = (401, 403, *NO_MODEL_LIST)  # every request would fail


@dataclass(slots=True)
class PendingRecord:
    """A conversation that is being answered, and its lines of the data file."""

    number: int  # from 0
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)  # turns so far, with their answers
    lines: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    skipped: int = 0  # turns not answered: the first without room, or that failed, and the rest
    problem: str | None = None  # why that one failed
    tries: int = 0  # failed requests, counted by the caller

    @property
    def open(self) -> bool:
        """True while a turn is left to answer."""
        return self.answers + self.skipped < len(self.conversation.asks)

    def asked(self) -> list[Message]:
        """Return the conversation up to the next answer."""
        return [*self.messages, *self.conversation.asks[self.answers]]

    def add_answer(self, answer: Message, tokens: dict[str, list[int]] | None = None) -> None:
        """Add the answer to `self.asked()`.

        With the answer's tokens every answer is a line. Without, a line holds the conversation and
        teaches all its answers, so there is one.
        """
        self.messages = [*self.asked(), answer]
        self.answers += 1
        if tokens is None:
            self.lines.clear()
        known: dict[str, Any] = tokens or {"answers": self.answers}
        style = self.conversation.style.in_line()
        self.lines.append({"record": self.number, "messages": self.messages, **style, **known})

    def skip(self, problem: str | None = None) -> None:
        """Give up the rest: the next turn does not fit, or has failed by a `problem`."""
        self.skipped = len(self.conversation.asks) - self.answers
        self.problem = problem


# Called with records that are finished.
Write = Callable[[list[PendingRecord]], None]


class Endpoint(NamedTuple):
    """A served model: the base URL, which usually ends in /v1, and the model's name there."""

    url: str
    model: str


class Servers(NamedTuple):
    """Endpoints that answer, and the number of concurrent requests to each."""

    endpoints: list[Endpoint]
    workers: int = 8
    api_key: str | None = None


class RequestError(Exception):
    """A failed request: its reason, and HTTP status (0: none came)."""

    def __init__(self, why: str, *, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


def connect(
    urls: Sequence[str],
    model: str | None = None,
    *,
    prefer: str = "",
    workers: int = 8,
    api_key: str | None = None,
) -> Servers:
    """Check that every endpoint answers, and find the model it serves. `model` None takes the only
    one, or the one named `prefer`.

    Raises InputError for one that cannot be used, and when the model must be named.
    """
    endpoints: list[Endpoint] = []
    for url in urls:
        base = url.rstrip("/").removesuffix("/chat/completions")
        try:
            served = asyncio.run(_models(base, api_key))
        except RequestError as error:
            if model is None or error.status not in NO_MODEL_LIST:
                raise InputError(str(error), field="url", value=url) from error
            served = []
        endpoints.append(Endpoint(base, model or _choose(url, served, prefer)))
    return Servers(endpoints, workers, api_key)


def ask_servers(
    servers: Servers, todo: Sequence[PendingRecord], params: SamplingParams, write: Write
) -> list[str]:
    """Answer records, and `write` each when it is finished. Returns the problems of records and
    endpoints. Raises InputError when no worker is left and records are."""
    run = _Run(params, write)
    if todo:
        asyncio.run(run.answer_all(servers, todo))
    return list(dict.fromkeys(run.problems))


@dataclass(slots=True)
class _Run:
    """The records that are left, and the workers that take them."""

    params: SamplingParams
    write: Write
    problems: list[str] = field(default_factory=list)
    waiting: asyncio.Queue[PendingRecord] = field(default_factory=asyncio.Queue)

    async def answer_all(self, servers: Servers, todo: Sequence[PendingRecord]) -> None:
        """Return when every record is answered or given up."""
        for record in todo:
            self.waiting.put_nowait(record)
        async with _client(servers.api_key) as client:
            endpoints = servers.endpoints * servers.workers
            workers = asyncio.gather(*(self._work(client, endpoint) for endpoint in endpoints))
            finished = asyncio.ensure_future(self.waiting.join())
            await asyncio.wait((workers, finished), return_when=asyncio.FIRST_COMPLETED)
            if workers.done():
                workers.result()  # raises other errors than RequestError
            workers.cancel()
        if left := self.waiting.qsize():
            answered = sum(not record.open for record in todo)
            state = f"{left} records are left, {answered} were answered and are kept"
            why = f"{self.problems[-1]} ({state})"
            raise InputError(why, field="url", fix="run again to continue")

    async def _work(self, client: httpx.AsyncClient, endpoint: Endpoint) -> None:
        failures = 0  # in a row
        while True:
            record = await self.waiting.get()
            try:
                while record.open:
                    await _answer(client, endpoint, record, self.params)
            except RequestError as error:
                self._retry_or_give_up(record, error)
                if error.status in WRONG_SETTINGS or failures == len(PAUSES):
                    self.problems.append(f"{endpoint.url} was given up: {error}")
                    return
                await asyncio.sleep(PAUSES[failures])
                failures += 1
            else:
                failures = 0
                self.write([record])
                self.waiting.task_done()

    def _retry_or_give_up(self, record: PendingRecord, error: RequestError) -> None:
        """Queue a record again unless its own request seems to be at fault."""
        at_fault = error.status not in (0, *UNAVAILABLE, *WRONG_SETTINGS)
        record.tries += at_fault
        if at_fault and (error.status < 500 or record.tries >= MAX_TRIES):
            self.problems.append(f"record {record.number + 1}: {error}")
        else:
            self.waiting.put_nowait(record)
        self.waiting.task_done()


async def _answer(
    client: httpx.AsyncClient, endpoint: Endpoint, record: PendingRecord, params: SamplingParams
) -> None:
    """Answer one turn. If the conversation leaves the server's context too little room, a shorter
    answer is requested; if it leaves none, the turn is skipped."""
    body = _body(endpoint.model, record, params)
    for limit in ({"max_tokens": params.max_tokens}, {}):
        try:
            answer = await _ask(client, endpoint, body | limit)
        except RequestError as error:
            too_long = error.status == 413 or "context" in str(error).lower()
            if error.status not in (400, 413) or not too_long:
                raise
        else:
            record.add_answer(answer)
            return
    record.skip()


def _body(model: str, record: PendingRecord, params: SamplingParams) -> dict[str, Any]:
    messages = record.asked()
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
    body = {
        "model": model,
        "messages": [_to_api(m, index < last) for index, m in enumerate(messages)],
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "tools": record.conversation.style.tools,
        "chat_template_kwargs": dict(record.conversation.style.args) or None,
    }
    return {name: value for name, value in body.items() if value is not None}


def _to_api(message: Message, past: bool) -> Message:
    """The message as the API has it: arguments of a tool call are JSON in a text, and the thoughts
    before earlier answers are not repeated (some endpoints refuse them)."""
    sent = {key: value for key, value in message.items() if not (past and key in THINKING)}
    if "tool_calls" in sent:
        sent["tool_calls"] = [_call_to_api(call) for call in sent["tool_calls"]]
    return sent


def _call_to_api(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"])
    return {**call, "function": {**call["function"], "arguments": arguments}}


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, body: dict[str, Any]) -> Message:
    answer = await _request(client, "POST", f"{endpoint.url}/chat/completions", body)
    try:
        given = answer["choices"][0]["message"]
        message = {**given, "role": "assistant", "content": given.get("content") or ""}
        found = to_messages({"messages": [message]})
        check_text(found)
        return found[0]
    except (KeyError, IndexError, TypeError, AttributeError, InputError) as error:
        raise RequestError("the answer is not a chat completion", status=500) from error


async def _models(base: str, api_key: str | None) -> list[str]:
    async with _client(api_key) as client:
        answer = await _request(client, "GET", f"{base}/models")
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (KeyError, TypeError) as error:
        raise RequestError("no list of models there: is it the API's base URL?") from error


def _choose(url: str, served: list[str], prefer: str) -> str:
    if prefer in served:
        return prefer
    if len(served) != 1:
        known = ", ".join(served) or "no model"
        raise InputError(f"serves {known}", field="url", value=url, fix="name one as the target")
    return served[0]


async def _request(
    client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None = None
) -> Any:
    try:
        response = await client.request(method, url, json=body)
        if response.is_success:
            return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        status = 504 if isinstance(error, httpx.ReadTimeout) else 0
        raise RequestError(f"no answer ({first_line(error)})", status=status) from error
    text = " ".join(response.text.split())[:300]
    why = f"HTTP {response.status_code} {response.reason_phrase}: {text}"
    raise RequestError(why, status=response.status_code)


def _client(api_key: str | None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(headers=headers, timeout=ANSWER_TIMEOUT, limits=httpx.Limits())
