"""Acceptance of a request's draft, and the tokens and text that it emits.

Shapes: R rows of the request's draft tree, V vocabulary.
"""

from dataclasses import replace

from torch import Tensor

from peagle.engine.request import Chunk, Request
from peagle.engine.sampling import Choice, accepted_rows
from peagle.engine.tree import Draft, Source


def accept(request: Request, logits: Tensor, best: Choice, ends: set[int]) -> list[int]:
    """Accept a request's draft as far as it goes, by its target logits (R, V), whose argmax is
    `best`; returns the rows of what was accepted. Raises RequestFailure when no token can be
    chosen."""
    sampler, draft = request.sampler, request.draft
    choice = best if sampler.plain else sampler.choose(logits, draft)
    path = accepted_rows(choice, draft)
    decoding = request.prompt_length <= request.num_computed_tokens == len(request.tokens) - 1
    request.draft = Draft()
    rows = [0, *path]
    tokens = [choice.tokens[row] for row in rows]
    logprobs = sampler.logprobs(logits, rows, tokens)
    sources: list[Source] = [*map(draft.source, path), "target"]
    emitted = 0
    while emitted < len(tokens) and request.finish_reason is None:
        source = sources[emitted]
        depth = 0 if source == "target" else emitted + 1
        logprob = logprobs[emitted] if logprobs else None
        _emit(request, Chunk(request.index, "", depth, source, logprob), tokens[emitted], ends)
        emitted += 1
    sampler.commit(tokens[:emitted])
    if decoding:
        request.stats.count(draft, path, emitted)
    request.num_computed_tokens = len(request.tokens) - 1
    return path


def _emit(request: Request, chunk: Chunk, token: int, ends: set[int]) -> None:
    """Append one token, as plain decoding would, and what it makes of text to `chunk`."""
    params = request.params
    request.tokens.append(token)
    request.drafted_output.append(chunk.drafted)
    if chunk.logprob is not None:
        request.logprobs.append(chunk.logprob)
    ended = token in ends and not params.ignore_eos
    text, stopped = "", True
    if not ended and token not in params.stop_token_ids:
        text, stopped = request.text.push(token)
    if stopped:
        request.finish_reason = "stop"
    elif request.left < 0:
        request.finish_reason = "length"
    if request.finish_reason is not None:
        text += request.text.finish()
    if text or chunk.logprob is not None:
        request.emitted.append(replace(chunk, text=text))
