"""One call from its requests to its response, whole or streamed."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from peagle.engine.grammar import TOO_COMPLEX
from peagle.engine.request import pieces
from peagle.server.errors import ApiError, content
from peagle.server.forms import Form
from peagle.server.jobs import Job, Update
from peagle.server.schema import Generation, StreamOptions
from peagle.server.worker import TOO_LATE, Worker


async def answer(
    http: HttpRequest, worker: Worker, form: Form, body: Generation, job: Job
) -> Response:
    """Raises ApiError when a request fails before the first token."""
    call = Call(http, worker, form, job)
    if body.stream:
        return stream(call.parts(body.stream_options))
    return JSONResponse(await call.whole())


def stream(parts: AsyncGenerator[dict[str, Any]]) -> StreamingResponse:
    """Server-sent events; a failure is one, too: the status has been sent."""

    async def events() -> AsyncIterator[str]:
        try:
            async with aclosing(parts):
                async for part in parts:
                    yield event(part)
        except ApiError as error:
            yield event(content(error.status_code, error.detail))
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class Call:
    """A job, and the client who waits for it."""

    def __init__(self, http: HttpRequest, worker: Worker, form: Form, job: Job) -> None:
        self._http = http
        self._worker = worker
        self._form = form
        self._job = job
        self._head = {  # what all parts of the response have
            "id": f"{form.prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": worker.metrics.model,
        }
        self._watch = asyncio.create_task(self._cancel_when_gone())

    async def whole(self) -> dict[str, Any]:
        """The response. Raises ApiError when a request fails."""
        async for _ in self._updates():
            pass
        choices = []
        for request in self._job.requests:
            logprobs = None if request.params.logprobs is None else request.logprobs
            choices.append(self._form.whole(request, request.text.text, logprobs))
        more = {"object": self._form.kind, "choices": choices, "usage": usage(self._job)}
        return self._head | more

    async def parts(self, options: StreamOptions) -> AsyncGenerator[dict[str, Any]]:
        """The response in parts. Raises ApiError when a request fails."""
        head = self._head | {"object": self._form.part_kind}
        tail = {"usage": None} if options.include_usage else {}
        for request in self._job.requests:
            if opening := self._form.opening(request.index):
                yield head | {"choices": [opening]} | tail
        async for update in self._updates():
            chunks = update.chunks
            text = "".join(chunk.text for chunk in chunks)
            logprobs = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
            choice = self._form.part(update.request, text, logprobs or None, update.ended)
            if options.peagle_drafts:
                choice["peagle_drafts"] = update.drafting._asdict() | {"pieces": pieces(chunks)}
            yield head | {"choices": [choice]} | tail
        if options.include_usage:
            yield head | {"choices": [], "usage": usage(self._job)}

    async def _updates(self) -> AsyncIterator[Update]:
        try:
            async for update in self._job.updates():
                if update.ended and update.request.failure is not None:
                    raise _failed(update.request.failure)
                yield update
        finally:
            self._leave()

    async def _cancel_when_gone(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(self._job)

    def _leave(self) -> None:
        """It is over, one way or another: nothing runs on for it; the log tells how it ended."""
        self._watch.cancel()
        note: dict[str, Any] = {"finish_reasons": ["abort"]}
        if self._job.left:
            self._worker.cancel(self._job)
        else:
            reasons = [request.finish_reason for request in self._job.requests]
            note = {"finish_reasons": reasons, "usage": usage(self._job)}
        self._http.scope["note"] |= note


def _failed(why: str) -> ApiError:
    """Of a request that could not go on: whose fault it is."""
    if why.startswith(TOO_LATE):
        return ApiError(503, why, headers={"retry-after": "1"})
    return ApiError(400 if why.startswith(TOO_COMPLEX) else 500, why)


def usage(job: Job) -> dict[str, Any]:
    """Tokens of a job that has ended. A prompt counts once, however many its answers."""
    firsts = job.tracks[:: job.copies]
    prompt = sum(track.request.prompt_length for track in firsts)
    output = sum(len(request.output) for request in job.requests)
    accepted = sum(sum(request.stats.accepted) for request in job.requests)
    drafted = sum(request.stats.drafted for request in job.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(track.cached or 0 for track in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }
