"""Make the response of a call from its job: whole, or streamed as server-sent events."""

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
from peagle.server.errors import ApiError
from peagle.server.forms import Form
from peagle.server.jobs import Event, Job, Update, pieces
from peagle.server.schema import Generation, StreamOptions
from peagle.server.worker import TOO_LATE, Worker


async def answer(
    http: HttpRequest, worker: Worker, form: Form, body: Generation, job: Job
) -> Response:
    """Raises ApiError when a request fails before the first token."""
    watch = asyncio.create_task(_cancel_if_left(http, worker, job))
    updates = _updates(http, worker, job, watch, body.form_field)
    head = {
        "id": f"{form.prefix}-{uuid4().hex}",
        "created": int(time.time()),
        "model": worker.metrics.model,
    }
    if body.stream:
        head["object"] = form.part_kind
        return stream(_parts(head, form, job, updates, body.stream_options))
    async for _ in updates:
        pass
    choices = []
    for request in job.requests:
        logprobs = None if request.params.logprobs is None else request.logprobs
        choices.append(form.whole(request, request.text.text, logprobs))
    return JSONResponse(head | {"object": form.kind, "choices": choices, "usage": usage(job)})


async def _parts(
    head: Event, form: Form, job: Job, updates: AsyncGenerator[Update], options: StreamOptions
) -> AsyncGenerator[Event]:
    """The parts of a streamed response; each begins with `head`."""
    tail = {"usage": None} if options.include_usage else {}
    async with aclosing(updates):
        for request in job.requests:
            if opening := form.opening(request.index):
                yield head | {"choices": [opening]} | tail
        async for update in updates:
            chunks = update.chunks
            text = "".join(chunk.text for chunk in chunks)
            asked = update.request.params.logprobs is not None
            logprobs = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
            choice = form.part(update.request, text, logprobs if asked else None, update.ended)
            if options.peagle_drafts:
                choice["peagle_drafts"] = update.drafting._asdict() | {"pieces": pieces(chunks)}
            yield head | {"choices": [choice]} | tail
    if options.include_usage:
        yield head | {"choices": [], "usage": usage(job)}


async def _updates(
    http: HttpRequest, worker: Worker, job: Job, watch: asyncio.Task[None], form_field: str
) -> AsyncGenerator[Update]:
    """Updates until all requests have ended. At the end, or when the consumer leaves early, the
    requests that still run are cancelled and `scope["note"]` gets how the call ended.
    `form_field` of the body asked for the answers' form.

    Raises ApiError when a request fails."""
    try:
        async for update in job.updates():
            if update.ended and update.request.failure is not None:
                raise _failed(update.request.failure, form_field)
            yield update
    finally:
        watch.cancel()
        note: dict[str, Any] = {"finish_reasons": ["abort"]}
        if job.left:
            worker.cancel(job)
        else:
            reasons = [request.finish_reason for request in job.requests]
            note = {"finish_reasons": reasons, "usage": usage(job)}
        http.scope["note"] |= note


async def _cancel_if_left(http: HttpRequest, worker: Worker, job: Job) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    worker.cancel(job)


def _failed(why: str, form_field: str) -> ApiError:
    """The error of a request that could not go on; the status tells whose fault it is."""
    if why.startswith(TOO_LATE):
        return ApiError(503, why, headers={"retry-after": "1"})
    if why.startswith(TOO_COMPLEX):
        return ApiError(400, f"{form_field}: {why}: make it simpler", param=form_field)
    return ApiError(500, why)


def stream(parts: AsyncGenerator[Event]) -> StreamingResponse:
    """Server-sent events; a failure is one, too: the status has been sent."""

    async def lines() -> AsyncIterator[str]:
        try:
            async with aclosing(parts):
                async for part in parts:
                    yield _event(part)
        except ApiError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _event(data: Event) -> str:
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
