"""One call from its requests to its response, whole or streamed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from peagle.engine.grammar import TOO_COMPLEX
from peagle.engine.request import pieces
from peagle.server.errors import ApiError, content
from peagle.server.forms import Form
from peagle.server.jobs import Job, Said
from peagle.server.schema import Generation, StreamOptions
from peagle.server.worker import TOO_LATE, Worker


async def answer(
    http: HttpRequest,
    worker: Worker,
    form: Form,
    body: Generation,
    job: Job,
    model: str,
) -> Response:
    """Raises ApiError when a request fails before the first token."""
    head = {"id": f"{form.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}
    call = Call(http, worker, form, job, head)
    if body.stream:
        events = call.events(body.stream_options)
        return StreamingResponse(events, media_type="text/event-stream")
    return JSONResponse(await call.whole())


class Call:
    """A job, and the client who waits for it."""

    def __init__(
        self, http: HttpRequest, worker: Worker, form: Form, job: Job, head: dict[str, Any]
    ) -> None:
        self._http, self._worker, self._form, self._job = http, worker, form, job
        self._head = head  # what all parts of the response have
        self._watch = asyncio.create_task(self._cancel_when_gone())

    async def whole(self) -> dict[str, Any]:
        """The response. Raises ApiError when a request fails."""
        try:
            async for _ in self._said():
                pass
        finally:
            self._leave()
        choices = [self._form.whole(request) for request in self._job.requests]
        more = {"object": self._form.kind, "choices": choices, "usage": usage(self._job)}
        return self._head | more

    async def events(self, options: StreamOptions) -> AsyncIterator[str]:
        """The response as server-sent events; a failure is one, too: the status has been sent."""
        head = self._head | {"object": self._form.part_kind}
        tail = {"usage": None} if options.include_usage else {}
        try:
            for request in self._job.requests:
                if opening := self._form.opening(request.index):
                    yield event(head | {"choices": [opening]} | tail)
            async for said in self._said():
                part = self._form.part(said)
                if options.peagle_drafts:
                    part["peagle_drafts"] = said.drafting._asdict() | {
                        "pieces": pieces(said.chunks)
                    }
                yield event(head | {"choices": [part]} | tail)
            if options.include_usage:
                yield event(head | {"choices": [], "usage": usage(self._job)})
        except ApiError as error:
            yield event(content(error.status_code, error.detail))
        finally:
            self._leave()
        yield "data: [DONE]\n\n"

    async def _said(self) -> AsyncIterator[Said]:
        async for said in self._job.said():
            if said.ended is not None and said.ended.failure is not None:
                raise _failed(said.ended.failure)
            yield said

    async def _cancel_when_gone(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(self._job)

    def _leave(self) -> None:
        """It is over, one way or another: nothing runs on for it; the log says how it went."""
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


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


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
