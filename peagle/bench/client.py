"""A client of an OpenAI-compatible server, by streaming chat completions. Never imports torch."""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Any

import httpx2 as httpx

from peagle.bench.load import Answer, AnswerError, Message
from peagle.engine.request import Stats
from peagle.errors import first_line

STREAM_TIMEOUT = httpx.Timeout(30.0, read=600.0)  # a token may wait in a queue
ROUNDS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FROM_LOOKUP = "peagle:spec_decode_num_accepted_tokens_from_lookup_total"
FORWARDS = "peagle:decode_forwards_total"
TOKENS = "peagle:decode_tokens_total"  # vLLM has none of the last three
COUNTED = (ROUNDS, DRAFTED, FROM_LOOKUP, FORWARDS, TOKENS)
Totals = Counter[tuple[str, str]]  # of counters, by their name and their label "position", or ""


class ChatClient(AbstractAsyncContextManager["ChatClient"]):
    """Client of a server at `url`, which usually ends in /v1; answers turns as `Native` does."""

    def __init__(self, url: str, body: dict[str, Any], api_key: str | None = None) -> None:
        """`body`: what every request has besides messages: model, max_tokens, temperature."""
        self.url = url.rstrip("/")
        self.body = body
        self._seeds = count(body.get("seed", 0))  # one for each answer
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=STREAM_TIMEOUT, limits=limits)
        self._before: Totals | None = None

    async def __aenter__(self) -> "ChatClient":
        self._before = await self._counted()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, messages: list[Message]) -> Answer:
        """Answer a conversation. Raises AnswerError when the server does not."""
        body = {**self.body, "messages": messages, "stream": True, "seed": next(self._seeds)}
        body["stream_options"] = {"include_usage": True}
        text = ""
        first = tokens = None
        try:
            async for event in self._events(body):
                text += "".join(map(new_text, event.get("choices") or ()))
                if text and first is None:
                    first = time.perf_counter()
                if event.get("usage"):
                    tokens = int(event["usage"]["completion_tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise AnswerError(f"no answer ({first_line(error)})", gone=True) from error
        if tokens is None:
            raise AnswerError("the stream has no usage: the server must support stream_options")
        return Answer(text, text, tokens, first or time.perf_counter())

    async def drafting(self) -> Stats:
        """Drafting statistics since `async with` began, other clients' requests included; no rounds
        where the server has no counters."""
        counted = await self._counted()
        if self._before is None or counted is None:
            return Stats()
        counted.subtract(self._before)
        positions = sorted(int(position) for name, position in counted if name == ACCEPTED)
        accepted = [counted[ACCEPTED, str(position)] for position in positions]
        rounds, drafted, *others = (counted[name, ""] for name in COUNTED)
        return Stats(rounds, drafted, accepted, *others)

    async def _counted(self) -> Totals | None:
        """The drafting counters of /metrics since the server began; None where it has none."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

        try:
            response = await self._client.get(f"{self.url.removesuffix('/v1')}/metrics")
            response.raise_for_status()
            families = list(text_string_to_metric_families(response.text))
        except (httpx.HTTPError, ValueError):
            return None
        totals = Totals()
        for sample in (sample for family in families for sample in family.samples):
            if sample.name in (*COUNTED, ACCEPTED):
                totals[sample.name, sample.labels.get("position", "")] += int(sample.value)
        return totals if (ROUNDS, "") in totals else None

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        address = f"{self.url}/chat/completions"
        async with self._client.stream("POST", address, json=body) as response:
            if not response.is_success:
                detail = " ".join((await response.aread()).decode(errors="replace").split())[:300]
                why = f"HTTP {response.status_code}: {detail}"
                raise AnswerError(why, gone=response.status_code >= 500)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield json.loads(data)


def new_text(choice: dict[str, Any]) -> str:
    """The new text of a streamed choice, reasoning included."""
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return reasoning + (delta.get("content") or "")
