"""Any OpenAI-compatible server, asked by streaming chat completions. Never imports torch."""

import json
import time
from collections.abc import AsyncIterator
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple

import httpx2 as httpx

from peagle.bench.load import Answer, AskError, Drafting, Message
from peagle.errors import InputError, first_line

TIMEOUT = httpx.Timeout(30.0, read=600.0)  # a token may wait behind a queue
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class Counters(NamedTuple):
    """What a server has counted since it began."""

    drafts: float
    accepted: float
    by_position: dict[int, float]


class Server:
    """A server at `url`, which ends in /v1 as a rule. Answers turns as `Native` does."""

    def __init__(self, url: str, body: dict[str, Any], api_key: str | None = None) -> None:
        """`body`: what every request asks besides its messages: model, max_tokens, temperature."""
        self.url, self.body = url.rstrip("/"), body
        self._seeds = count(body.get("seed", 0))  # an answer's own
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(headers=headers, timeout=TIMEOUT, limits=limits)
        self._before: Counters | None = None

    async def __aenter__(self) -> "Server":
        self._before = await self.counters()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def ask(self, messages: list[Message]) -> Answer:
        """Answer a conversation. Raises AskError when the server does not."""
        body = {**self.body, "messages": messages, "stream": True, "seed": next(self._seeds)}
        body["stream_options"] = {"include_usage": True}
        text, first, tokens = "", None, None
        try:
            async for event in self._events(body):
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    said = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (
                        delta.get("content") or ""
                    )
                    if said and first is None:
                        first = time.perf_counter()
                    text += said
                if event.get("usage"):
                    tokens = int(event["usage"]["completion_tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise AskError(f"no answer ({first_line(error)})", gone=True) from error
        if tokens is None:
            raise AskError("the stream says nothing of usage: the server must know stream_options")
        return Answer(text, tokens, first or time.perf_counter())

    async def counters(self) -> Counters | None:
        """What /metrics says of drafting; None where it says nothing."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

        root = self.url.removesuffix("/v1")
        try:
            response = await self._client.get(f"{root}/metrics")
            response.raise_for_status()
            families = {f.name: f for f in text_string_to_metric_families(response.text)}
            drafts, accepted = (
                sum(s.value for s in families[name].samples if s.name.endswith("_total"))
                for name in (DRAFTS, ACCEPTED)
            )
        except (httpx.HTTPError, KeyError, ValueError):
            return None
        by_position = dict[int, float]()
        for sample in families[BY_POSITION].samples if BY_POSITION in families else ():
            if sample.name.endswith("_total"):
                position = int(sample.labels["position"])
                by_position[position] = by_position.get(position, 0.0) + sample.value
        return Counters(drafts, accepted, by_position)

    async def drafting(self) -> Drafting:
        """Since `async with` began; nothing where the server has no counters. (What others ask
        meanwhile counts, too.)"""
        after, before = await self.counters(), self._before
        if before is None or after is None:
            return Drafting()
        by_position = [
            after.by_position[at] - before.by_position.get(at, 0.0)
            for at in sorted(after.by_position)
        ]
        return Drafting(after.drafts - before.drafts, after.accepted - before.accepted, by_position)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        address = f"{self.url}/chat/completions"
        async with self._client.stream("POST", address, json=body) as response:
            if not response.is_success:
                said = " ".join((await response.aread()).decode(errors="replace").split())[:300]
                why = f"HTTP {response.status_code}: {said}"
                raise AskError(why, gone=response.status_code >= 500)
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield json.loads(data)


def served_model(url: str, api_key: str | None = None) -> str:
    """The one model a server has. Raises InputError when there are several, or no server."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=TIMEOUT)
        response.raise_for_status()
        names = [entry["id"] for entry in response.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise InputError(f"--url {url}: no list of models there ({first_line(error)})") from error
    if len(names) != 1:
        raise InputError(f"--url {url} serves {', '.join(names)}: name one as TARGET")
    return str(names[0])
