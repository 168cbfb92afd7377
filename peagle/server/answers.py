"""Responses of a call from its job, whole or streamed as server-sent events.

A builder makes the choices of one request: `part` has the text of a round, `whole` is that of a
request that has ended. Until then only its constants are read. Nothing is sent before the engine's
first output: clients take the time to the first token from it.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Literal
from uuid import uuid4

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from transformers import PreTrainedTokenizerBase

from peagle.engine.params import TokenLogprob
from peagle.engine.request import Chunk, Request, Stats
from peagle.server import responses
from peagle.server.conversations import AnswerParser
from peagle.server.logprobs import AnswerLogprobs, Spelling, Token, of_chat, of_text
from peagle.server.metrics import Verified
from peagle.server.responses import ApiError, Drafts, Piece, Tree, Usage
from peagle.server.schema import Generation, StreamOptions
from peagle.server.worker import FAILED, Event, Job, Update, Worker

Logprobs = list[TokenLogprob]


class _Builder:
    """The log-probabilities of one request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, request: Request) -> None:
        self.tokenizer = tokenizer
        self.request = request
        wanted = request.params.logprobs is not None
        self._logprobs = AnswerLogprobs(tokenizer) if wanted else None

    def tokens(self, text: str, logprobs: Logprobs, ended: bool) -> list[Token]:
        """Tokens whose text is certain now; none where log-probabilities are not requested."""
        return self._logprobs.push(logprobs, text, ended) if self._logprobs else []


class TextBuilder(_Builder):
    """Builds the choices of a request to /v1/completions."""

    response = chunk = responses.Completion
    prefix = "cmpl"  # of ids

    def part(self, text: str, logprobs: Logprobs, ended: bool) -> responses.TextChoice:
        """A streamed choice; its text may be empty at the end."""
        reason: Any = self.request.finish_reason if ended else None
        shown = of_text(self.tokens(text, logprobs, ended))
        return responses.TextChoice(
            index=self.request.index, text=text, finish_reason=reason, logprobs=shown
        )

    def whole(self) -> responses.TextChoice:
        """The only part."""
        return self.part(self.request.text.text, self.request.logprobs, ended=True)


class ChatBuilder(_Builder):
    """Builds the choices of a request to /v1/chat/completions; `max_calls` as in AnswerParser."""

    response = responses.ChatCompletion
    chunk = responses.ChatChunk
    prefix = "chatcmpl"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_calls: int | None, request: Request
    ) -> None:
        super().__init__(tokenizer, request)
        prompt = request.tokens[: request.prompt_length]
        self._parser = AnswerParser(tokenizer, prompt, max_calls)
        self._role: Literal["assistant"] | None = "assistant"  # of the next part

    def part(self, text: str, logprobs: Logprobs, ended: bool) -> responses.ChatPart:
        """A streamed choice; the first one has the role, tool calls come whole, at the end."""
        delta = self._parser.push(text, self.request.output if ended else None)
        delta.role = self._role
        self._role = None
        reason: Any = self.request.finish_reason if ended else None
        if delta.tool_calls and reason == "stop":  # an answer that was cut may lack calls
            reason = "tool_calls"
        shown = of_chat(self.tokens(text, logprobs, ended))
        return responses.ChatPart(
            index=self.request.index, delta=delta, finish_reason=reason, logprobs=shown
        )

    def whole(self) -> responses.ChatChoice:
        """The only part, as a message."""
        part = self.part(self.request.text.text, self.request.logprobs, ended=True)
        calls: list[responses.ToolCall] = [*part.delta.tool_calls]
        content = part.delta.content or ""
        shown = content.strip() or None if calls else content
        message = responses.Message(content=shown, reasoning=part.delta.reasoning, tool_calls=calls)
        choice = responses.ChatChoice(index=part.index, message=message, logprobs=part.logprobs)
        choice.finish_reason = part.finish_reason
        return choice


Builder = TextBuilder | ChatBuilder
Build = Callable[[Request], Builder]
Updates = AsyncGenerator[Update]


async def answer(
    http: HttpRequest, worker: Worker, build: Build, body: Generation, job: Job
) -> Response:
    """The response of a job. Raises ApiError when a request fails before the first token."""
    updates = _updates(http, worker, job, body.form_field)
    builders = [build(request) for request in job.requests]
    first = builders[0]
    head: Event = {"id": f"{first.prefix}-{uuid4().hex}", "created": int(time.time())}
    head["model"] = worker.metrics.model
    if body.stream:
        return stream(_parts(head, builders, job, updates, body.stream_options))
    async for _ in updates:
        pass
    # The log-probabilities of a long answer take seconds, which other requests do not wait for.
    choices: list[Any] = await asyncio.to_thread(lambda: [builder.whole() for builder in builders])
    made = first.response(**head, choices=choices, usage=usage(job))
    return Response(made.model_dump_json(), media_type="application/json")


async def _parts(
    head: Event, builders: list[Builder], job: Job, updates: Updates, options: StreamOptions
) -> AsyncGenerator[Event]:
    """The parts of a streamed response, each with the fields of `head`."""
    first = builders[0]
    hidden = None if options.include_usage else {"usage"}

    def made(choices: list[Any], counts: Usage | None = None) -> Event:
        return first.chunk(**head, choices=choices, usage=counts).model_dump(exclude=hidden)

    spelling = Spelling(first.tokenizer) if options.peagle_drafts else None
    async with aclosing(updates):
        async for update in updates:
            text = "".join(chunk.text for chunk in update.chunks)
            logprobs = [one.logprob for one in update.chunks if one.logprob is not None]
            choice = builders[update.request.index].part(text, logprobs, update.ended)
            if spelling is not None:
                trees = [_tree(each, spelling) for each in update.verified]
                choice.peagle_drafts = drafts(update.tokens, update.stats, update.chunks, trees)
            yield made([choice])
    if options.include_usage:
        yield made([], usage(job))


def drafts(tokens: int, stats: Stats, chunks: list[Chunk], trees: list[Tree]) -> Drafts:
    """The drafting of an answer of `tokens` tokens so far, with new text and trees."""
    counts = {name: count for name, count in asdict(stats).items() if name in Drafts.model_fields}
    counts |= {"tokens": tokens, "accepted": sum(stats.accepted)}
    pieces = [Piece(text=one.text, place=one.depth, source=one.source) for one in chunks]
    return Drafts(**counts, pieces=pieces, trees=trees)


def _tree(verified: Verified, spelling: Spelling) -> Tree:
    draft = verified.draft
    before, *emitted = map(spelling.name, verified.tokens)
    accepted = draft.follow(verified.tokens[1:])
    return Tree(
        before=before,
        nodes=list(map(spelling.name, draft.tokens)),
        parents=draft.parents,
        chances=draft.chances,
        accepted=accepted,
        after="".join(emitted[len(accepted) :]),
        matched=draft.match.size,
        looked_up=draft.follow(draft.match.tokens),
    )


async def _updates(http: HttpRequest, worker: Worker, job: Job, form_field: str) -> Updates:
    """Updates until all requests have ended. At the end, or when the consumer leaves early, the
    requests that still run are cancelled and the call's end is noted in `scope["note"]`.
    `form_field` of the body constrains the answers' form.

    Raises ApiError when a request, or the engine, fails."""
    try:
        while job.left or not job.updates.empty():
            update = await job.updates.get()
            if update is None:
                raise ApiError(500, FAILED)
            if update.ended and update.request.failure is not None:
                raise _failed(update.request, worker.too_late, form_field)
            yield update
    finally:
        note: dict[str, Any] = {"finish_reasons": ["abort"]}
        if job.left:
            job.cancelled = True
        else:
            reasons = [request.finish_reason for request in job.requests]
            note = {"finish_reasons": reasons, "usage": usage(job).model_dump()}
        http.scope["note"] |= note


async def cancel_if_left(http: HttpRequest, job: Job) -> None:
    """Cancel a job whose client leaves. The end of its response is told in the same way, and then
    changes nothing."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    job.cancelled = True


def _failed(request: Request, too_late: str, form_field: str) -> ApiError:
    """The error of a request that could not go on."""
    why = str(request.failure)
    if why == too_late:
        return ApiError(503, why, headers={"retry-after": "1"})
    if request.grammar_failed:
        return ApiError(400, f"{form_field}: {why}; make it simpler", param=form_field)
    return ApiError(500, why)


def stream(parts: AsyncGenerator[Event]) -> StreamingResponse:
    """Server-sent events; a failure is an event, too, since the status has been sent."""

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
    """One line for any client: some of them end lines at U+2028, too, which ASCII lacks."""
    return f"data: {json.dumps(data)}\n\n"


def usage(job: Job) -> Usage:
    """Token counts of a job that has ended. A prompt counts once, however many its answers."""
    firsts = job.tracks[:: job.copies]
    prompt = sum(track.request.prompt_length for track in firsts)
    output = sum(len(request.output) for request in job.requests)
    accepted = sum(sum(request.stats.accepted) for request in job.requests)
    drafted = sum(request.stats.drafted for request in job.requests)
    cached = sum(track.cached or 0 for track in firsts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=responses.PromptDetails(cached_tokens=cached),
        completion_tokens_details=responses.AnswerDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        ),
    )
