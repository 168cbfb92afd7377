"""One call from its requests to its response, whole or streamed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from peagle.engine.request import Request
from peagle.server.errors import ApiError, content
from peagle.server.forms import Form
from peagle.server.schema import Generation
from peagle.server.worker import Job, Worker


async def answer(
    http: HttpRequest,
    worker: Worker,
    form: Form,
    body: Generation,
    requests: list[Request],
    model: str,
) -> Response:
    """Raises InputError or ApiError for whatever is wrong before the first token."""
    job = await worker.submit(requests, body.n)
    leaving = asyncio.create_task(_cancel_when_gone(http, worker, job))
    head = {"id": f"{form.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}
    if body.stream:
        events = _events(job, form, head, body)
        return StreamingResponse(
            _noted(http, worker, job, leaving, events), media_type="text/event-stream"
        )
    try:
        async for said in job.said():
            if said.ended is not None and said.ended.failure is not None:
                raise ApiError(500, said.ended.failure)
    finally:
        _leave(http, worker, job, leaving)
    choices = [form.whole(request) for request in job.requests]
    whole = head | {"object": form.kind, "choices": choices, "usage": usage(job)}
    return JSONResponse(whole)


async def _events(
    job: Job, form: Form, head: dict[str, Any], body: Generation
) -> AsyncIterator[str]:
    """Server-sent events."""
    head = head | {"object": form.part_kind}
    tail = {"usage": None} if body.stream_options.include_usage else {}
    for request in job.requests:
        if opening := form.opening(request.index):
            yield _event(head | {"choices": [opening]} | tail)
    try:
        async for said in job.said():
            if said.ended is not None and said.ended.failure is not None:
                raise ApiError(500, said.ended.failure)
            yield _event(head | {"choices": [form.part(said)]} | tail)
    except ApiError as error:  # the status has been sent: this is how clients hear of it
        yield _event(content(error.status_code, error.detail))
    else:
        if body.stream_options.include_usage:
            yield _event(head | {"choices": [], "usage": usage(job)})
    yield "data: [DONE]\n\n"


async def _noted(
    http: HttpRequest,
    worker: Worker,
    job: Job,
    leaving: asyncio.Task[None],
    events: AsyncIterator[str],
) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield event
    finally:
        _leave(http, worker, job, leaving)


def _leave(http: HttpRequest, worker: Worker, job: Job, leaving: asyncio.Task[None]) -> None:
    """A call is over, one way or another: nothing runs on for it; the log says how it went."""
    leaving.cancel()
    if job.left:
        worker.cancel(job)
        http.scope["note"] |= {"finish_reasons": ["abort"]}
    else:
        reasons = [request.finish_reason for request in job.requests]
        http.scope["note"] |= {"finish_reasons": reasons, "usage": usage(job)}


async def _cancel_when_gone(http: HttpRequest, worker: Worker, job: Job) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    worker.cancel(job)


def _event(data: dict[str, Any]) -> str:
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
